"""Optimizers that are given as a list, through every format and back into engine.load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.helpers import build, load, same, train, whole
from tests.support.ranks import run
from torch_shard.checkpoint import save
from torch_shard.cli import main


def _two(model: nn.Module) -> list[Any]:
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    vectors = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    groups = [{"params": vectors[:1], "lr": 0.1}, {"params": vectors[1:]}]
    return [torch.optim.SGD(matrices, lr=0.1, momentum=0.9), torch.optim.AdamW(groups, lr=0.01)]


class _Both:
    def __init__(self, several: list[Any]) -> None:
        self.several = several

    def step(self) -> None:
        for own in self.several:
            own.step()

    def zero_grad(self) -> None:
        for own in self.several:
            own.zero_grad()


def _trained(rank: int, seed: int) -> Any:
    model, engine, several = build(seed=seed, make=_two)
    train(model, _Both(several), 0, range(2))  # buffers are one rank's own
    return model, engine, several


def _all_of(engine: Any, several: list[Any]) -> list[Any]:
    return [whole(engine, own) for own in several]


def _there_and_back(rank: int, world_size: int, folder: Path) -> None:
    _model, engine, several = _trained(rank, 0)
    expected = _all_of(engine, several)
    save(engine, folder / "ours", several)
    dist.barrier()
    if rank == 0:
        state = {"model": expected[0]["model"], "optimizer": [_numbered(own["optimizer"]) for own in expected]}
        torch.save(state, folder / "list.pt")
        for source, target, form in (
            ("ours", "merged.pt", "torch"),
            ("list.pt", "list2.pt", "torch"),
            ("list.pt", "sharded", "sharded"),
            ("sharded", "merged2.pt", "torch"),
        ):
            assert main(["convert", str(folder / source), str(folder / target), "--to", form]) == 0
        assert type(torch.load(folder / "list2.pt", weights_only=True)["optimizer"]) is list
        assert main(["diff", str(folder / "ours"), str(folder / "list.pt")]) == 0
    dist.barrier()
    engine.close()
    for name in ("ours", "merged.pt", "list.pt", "list2.pt", "sharded", "merged2.pt"):
        _model, engine, several = _trained(rank, 1)  # the engine does not hold it
        load(engine, folder / name, several)
        same(_all_of(engine, several), expected, name)
        engine.close()


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    """As optimizer.state_dict() of an unsharded model has it."""
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        groups.append({**group, "params": [numbers.setdefault(name, len(numbers)) for name in group["params"]]})
    return {"state": {numbers[name]: own for name, own in state["state"].items()}, "param_groups": groups}


@pytest.mark.exhaustive
def test_a_list_of_optimizers_goes_to_every_format_and_back(tmp_path):
    run(2, _there_and_back, tmp_path)
