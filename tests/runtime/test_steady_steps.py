"""From its third step on, a training that repeats itself needs no agreement on what is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.followed import followed
from tests.support.ranks import ranks
from torch_shard.comm.divergence import OperationSequence


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optim"])
@ranks(2)
def test_gathers_are_predicted(
    rank: int, monkeypatch: pytest.MonkeyPatch, strategy: Any, prefetch: int, micro_batches: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    torch_shard.shard(model, strategy=strategy, prefetch=prefetch, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked: list[str] = []
    check = OperationSequence.check

    def counted(operations: OperationSequence, what: str, *args: Any) -> Any:
        asked.append(what)
        return check(operations, what, *args)

    monkeypatch.setattr(OperationSequence, "check", counted)
    steps = []
    for _ in range(6):
        asked.clear()
        with followed(monkeypatch) as found:
            for _ in range(micro_batches):
                model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append((found, [what for what in asked if what.startswith("the agreement to gather")]))
    gathers, agreements = steps[-1]
    assert not agreements
    assert all(step == (gathers, []) for step in steps[2:])
