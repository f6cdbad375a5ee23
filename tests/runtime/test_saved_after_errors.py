"""An exception or Ctrl-C ends training, and the ``except`` block saves the model, as under DDP."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_shard
from tests.support.marks import exhaustive
from tests.support.models import MLP, loss_of
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

STEPS = 2  # before the one that fails


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 20).view(4, 5) * (rank + 1) + step


class Failing:
    """Raises at one place of a step."""

    def __init__(self, place: str, error: type[BaseException]) -> None:
        self.place, self.error, self.now = place, error, False

    def at(self, place: str, *_: Any) -> None:
        if self.now and place == self.place:
            raise self.error("on purpose")


def train(model: nn.Module, module: nn.Module, failing: Failing, rank: int) -> None:
    module.blocks[1].register_forward_hook(partial(failing.at, "forward"))
    module.blocks[1].register_full_backward_hook(partial(failing.at, "backward"))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for step in range(STEPS + 2):
        failing.now = step == STEPS
        failing.at("data")
        loss = loss_of(model(batch(rank, step)))
        loss.backward()
        failing.at("step")
        optimizer.step()
        optimizer.zero_grad()


def made(shards: bool, **settings: Any) -> tuple[nn.Module, nn.Module]:
    """Return what is called, and the module."""
    torch.manual_seed(0)
    module = MLP()
    if not shards:
        return DistributedDataParallel(module), module
    torch_shard.shard(module, unit_bytes=500, **settings)
    return module, module


PLACES = ["forward", "step", *exhaustive("data", "backward")]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, *exhaustive(ZeroDivisionError)])
@ranks(2, exhaustive=(3,))
def test_all_ranks_fail_and_one_or_all_of_them_save_what_ddp_saves(
    rank: int, world_size: int, place: str, error: type[BaseException], tmp_path: Path
) -> None:
    found = []
    for shards in (False, True):
        model, module = made(shards)
        try:
            train(model, module, Failing(place, error), rank)
        except error:
            for ranks_that_save in ([0], range(world_size)):
                if rank in ranks_that_save:
                    torch.save({"state": module.state_dict(), "model": module}, tmp_path / f"{rank}")
                    file = torch.load(tmp_path / f"{rank}", weights_only=False)
                    found += [file["state"], file["model"].state_dict()]
                dist.barrier()
    half = len(found) // 2
    assert half == (4 if rank == 0 else 2)
    torch.testing.assert_close(found[half:], found[:half])


# Where the others have made a step that this rank has not, the values that it had are gone: docs/alone.md.
@pytest.mark.parametrize("place", ["forward", *exhaustive("data", "backward")])
@ranks(2, fresh=True, timeout=60)
def test_one_rank_fails_and_saves_while_the_others_go_on(rank: int, place: str, tmp_path: Path) -> None:
    found = []
    for shards in (False, True):
        model, module = made(shards, timeout=8.0)
        failing = Failing(place, ZeroDivisionError) if rank == 0 or not shards else Failing("", ZeroDivisionError)
        with pytest.raises(ZeroDivisionError if failing.place else ShardError):
            try:
                train(model, module, failing, rank)
            except ZeroDivisionError:
                torch.save(module.state_dict(), tmp_path / f"{rank}")
                found.append(torch.load(tmp_path / f"{rank}"))
                raise
    if rank == 0:
        torch.testing.assert_close(found[1], found[0])
