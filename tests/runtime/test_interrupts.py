"""A KeyboardInterrupt within a forward, which the user's code catches: torch calls no hooks behind such a forward."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.comm.work import Pending

INTERRUPTS = [KeyboardInterrupt, *exhaustive(SystemExit)]
STRATEGIES = ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")]


class Net(MLP):
    """Buffers that follow the data, as batch norms have them, and a block that can be interrupted."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(5))
        self.blocks[1].register_forward_hook(self.interrupt)
        self.ended_by: type[BaseException] | None = None

    def interrupt(self, *_: Any) -> None:
        if self.ended_by is not None:
            raise self.ended_by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x) * self.scale)


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model(batch(rank, step).float())).backward()
        optimizer.step()
        optimizer.zero_grad()


def interrupted(model: Net, run: Callable[[], Any], by: type[BaseException] = KeyboardInterrupt) -> None:
    model.ended_by = by
    with pytest.raises(by):
        run()
    model.ended_by = None


def sharded(rank: int, **options: Any) -> tuple[Net, torch_shard.Engine, Any]:
    """After two steps, and a forward that was interrupted."""
    torch.manual_seed(0)
    model = Net()
    engine = torch_shard.shard(model, unit_bytes=500, timeout=20.0, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer, rank, range(2))
    interrupted(model, lambda: train(model, optimizer, rank, range(2, 3)))
    return model, engine, optimizer


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("by", INTERRUPTS)
@pytest.mark.parametrize("grad", [True, *exhaustive(False)])
@ranks(2)
def test_training_goes_on_as_with_ddp(rank, strategy, by, grad):
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        module = model = Net()
        if shards:
            engine = torch_shard.shard(module, strategy=strategy, unit_bytes=500, timeout=20.0)
        else:
            model = DistributedDataParallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        train(model, optimizer, rank, range(2))
        for step in (7, 8):
            with contextlib.nullcontext() if grad else torch.no_grad():
                interrupted(module, lambda step=step, model=model: model(batch(rank, step).float()), by)
        train(model, optimizer, rank, range(2, 5))
        if shards:
            assert not runtime_of(engine).forwards.running
            engine.close(optimizer)
        found.append({name: value.clone() for name, value in module.state_dict().items()})
    torch.testing.assert_close(found[1], found[0])


# Under shard_optim no unit is resharded where the next forward begins, so that this one must be gathered anew by itself.
@pytest.mark.parametrize("strategy", ["shard_optim", *exhaustive("full_shard", "shard_grad_op")])
@ranks(2)
def test_training_goes_on_where_it_came_while_a_unit_was_gathered(rank, world_size, strategy, monkeypatch):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    pair.train(0, 1)
    wait = Pending.wait
    left = [2]  # the second gather of the forward, which was begun ahead

    def interrupt(self: Pending) -> None:
        left[0] -= self.channel.purpose == "all-gather"
        if not left[0]:
            raise KeyboardInterrupt
        wait(self)

    with monkeypatch.context() as patch:
        patch.setattr(Pending, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            plain_backward(pair.model, batch(rank, 2))
    pair.train(3, 4)


@ranks(2)
def test_what_was_learnt_until_then_is_saved(rank, tmp_path):
    _, engine, optimizer = sharded(rank)
    engine.save(tmp_path / "saved", optimizer=optimizer)
    other = Net()
    again = torch_shard.shard(other, unit_bytes=500, timeout=20.0)
    again.load(tmp_path / "saved")
    torch.testing.assert_close(again.state_dict(), engine.state_dict())


@ranks(2)
def test_it_can_be_copied_and_looked_at_and_made_plain(rank):
    model, engine, optimizer = sharded(rank)
    twin = copy.deepcopy(model)
    with engine.gathered(), torch_shard.engine_of(twin).gathered():
        torch.testing.assert_close(list(twin.parameters()), list(model.parameters()))
    engine.close(optimizer)
    assert all(type(p) is nn.Parameter for p in model.parameters())


@ranks(2)
def test_within_a_forward_it_is_still_refused(rank):
    """Also where an inner forward was interrupted, and the outer one goes on."""
    model, engine, _ = sharded(rank)
    said = []

    class Catches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            model.ended_by = KeyboardInterrupt
            with contextlib.suppress(KeyboardInterrupt):
                model.blocks[1](x)
            model.ended_by = None
            with pytest.raises(torch_shard.errors.UnitStateError, match="inside a forward") as caught:
                engine.state_dict()
            said.append(caught.value)
            return x

    model.head.register_forward_pre_hook(lambda _, args: Catches()(*args))
    model(batch(rank, 4).float())
    assert said
    engine.state_dict()
