"""One rank reads the model alone under hybrid strategies: from the ranks of its own replica."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.hybrid.harness import TWO, same_copies
from tests.support.marks import quick
from tests.support.ranks import ranks

X = torch.linspace(-1, 1, 18).view(3, 6)


def file_of(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    engine = torch_shard.engine_of(model)
    return model.state_dict() if engine is None else engine.state_dict(form="full", rank0_only=False)


READS: dict[str, Callable[[nn.Module], Any]] = {
    "a forward": lambda model: model(X),
    "a part's forward": lambda model: model[1](X),
    "a norm": lambda model: model[0][0].weight.norm(),
    "a row": lambda model: model[1][0].weight[2],
    "all elements": lambda model: model[0][2].weight.tolist(),
    "a state dict": full_state_dict,
    "a file": file_of,
    "a copy": lambda model: copy.deepcopy(model)(X),
}


def train(models: list[tuple[nn.Module, torch.optim.Optimizer]], batch: torch.Tensor) -> None:
    for model, optimizer in models:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("recording", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("settings", quick(["hybrid_shard", "hybrid_shard_zero2"], ["hybrid_shard"]))
@pytest.mark.parametrize("reader", quick([0, 1, 2, 3], [3]))
@ranks(4, timeout=90)
def test_a_rank_reads_alone_what_plain_torch_gives(rank: int, reader: int, settings: str, recording: bool) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(2)))
    sharded = copy.deepcopy(plain)
    engine = torch_shard.shard(sharded, units=["0", "1"], alone_after=0.1, **{**TWO, "strategy": settings})
    models = [(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)) for model in (sharded, plain)]
    for name, read in READS.items():
        train(models, X)
        if rank == reader and not (recording and "forward" in name) and not (recording and name == "a copy"):
            with torch.set_grad_enabled(recording):
                found, expected = read(sharded), read(plain)
            torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")
    train(models, X)
    same_copies(engine)
    torch.testing.assert_close(full_state_dict(sharded), plain.state_dict())
    assert (engine.statistics().lone_reads > 0) == (rank == reader)
