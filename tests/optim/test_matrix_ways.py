"""Ways in which optimizers of whole matrices are written, and ranks that differ before a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same
from tests.optim.helpers import O
from tests.support.marks import quick
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard.errors import DivergenceError, ShardError


class Whitened(O.Optimizer):
    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr, "calls": torch.zeros(()), "history": []})
        self.calls = 0

    def update(self, p, group):
        state = self.state[p]
        state["sum"] = state.get("sum", 0.0) + p.grad
        total = state["sum"]
        update = (
            total @ torch.linalg.inv(torch.eye(p.shape[1], dtype=p.dtype) + total.T @ total) if p.ndim == 2 else total
        )
        p.sub_(update, alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)


class CountsInPlace(Whitened):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] += 1
            group["history"].append(int(group["calls"]))
            group = {**group, "lr": group["lr"] / float(group["calls"])}
            for p in group["params"]:
                self.update(p, group)


class CountsBehindTheLoop(Whitened):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] *= 0.5
        self.state["all"]["rounds"] = self.state["all"].get("rounds", 0) + 1


class LooksAtParameters(Whitened):
    def update(self, p, group):
        if isinstance(p, nn.Parameter) and p.requires_grad:
            super().update(p, {"lr": group["lr"] * getattr(p, "scale", 1.0)})


class EveryOther(Whitened):
    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 and self.param_groups[0]["lr"]:
            return
        super().step()


WAYS = [Whitened, CountsInPlace, CountsBehindTheLoop, LooksAtParameters, EveryOther]


class ElementWise(LooksAtParameters):
    def update(self, p, group):
        if isinstance(p, nn.Parameter) and p.requires_grad:
            p.sub_(p.grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


for way in WAYS:
    torch_shard.optim.register(way, kind="matrix")
torch_shard.optim.register(ElementWise, kind="elementwise")


def make(kind):
    def optimizer(model):
        model.head.weight.scale, model.blocks[1].up.bias.scale = 3.0, 0.25  # which deepcopy does not copy
        return kind(model.parameters())

    return optimizer


@pytest.mark.parametrize("kind", [*quick(WAYS, [Whitened, LooksAtParameters]), ElementWise])
@ranks(2, exhaustive=(1, 3))
def test_a_declared_optimizer_may_be_written_in_these_ways(rank, world_size, kind):
    pair = Pair(MLP, rank, world_size, optimizer=make(kind))
    for step in range(4):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    for ours, theirs in zip(pair.optimizer.param_groups, pair.plain_optimizer.param_groups, strict=True):
        for key in ("lr", "calls", "history"):
            same(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key]), key)
    assert pair.optimizer.state.get("all") == pair.plain_optimizer.state.get("all")


@ranks(2)
def test_ranks_that_list_parameters_in_another_order_are_told(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    params = list(pair.model.parameters())
    optimizer = Whitened(params if rank == 0 else params[::-1])
    plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(DivergenceError, match="order"):
        optimizer.step()
    pair.check()


@ranks(2)
def test_a_state_dict_that_differs_between_the_ranks_is_refused(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Whitened(m.parameters()))
    pair.step(plain_backward, batch(rank, 0))
    state = pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)
    if rank == 1:
        state["state"]["head.weight"] = {}
    with pytest.raises(ShardError):
        pair.engine.load_optim_state_dict(Whitened(pair.model.parameters()), state)
    pair.step(plain_backward, batch(rank, 1))
    pair.check()


@ranks(2)
def test_closing_gives_state_back_in_its_own_dtype(rank, world_size):
    model = nn.Linear(5, 7).to(torch.bfloat16)
    engine = torch_shard.shard(model)
    optimizer = O.Adafactor(model.parameters())
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for own in optimizer.state.values():
        own["extra"] = torch.ones(3, dtype=torch.float32)
    engine.close(optimizer)
    own = optimizer.state[model.weight]
    assert own["step"].dtype == torch.float32 and own["row_var"].shape == (7, 1)
    assert own["extra"].dtype == torch.float32


FAKE = """
import torch, torch.distributed as dist, torch_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])
engine = torch_shard.shard(model, unit_bytes=1)
optimizer = torch.optim.Muon([p for p in model.parameters() if p.ndim == 2])
for _ in range(2):
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
def test_steps_on_torchs_fake_group():
    run_python("-c", FAKE)
