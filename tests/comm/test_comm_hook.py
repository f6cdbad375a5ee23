"""``engine.register_comm_hook``: the user's own reduction, with the signatures of torch's FullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, DivergenceError, ShardError, UnitStateError
from torch_shard.frontend import compress_gradients

SHARDED = ["full_shard", *exhaustive("shard_grad_op", "shard_optim")]


def with_hook(pair: Pair, state: Any, hook: Any) -> Pair:
    pair.engine.register_comm_hook(state, hook)
    return pair


def with_torchs_hook(build: Any, rank: int, world_size: int, strategy: str = "full_shard", **settings: Any) -> Pair:
    hook = default_hooks.allreduce_hook if strategy == "no_shard" else default_hooks.reduce_scatter_hook
    pair = Pair(build, rank, world_size, strategy=strategy, **settings)
    return with_hook(pair, default_hooks.DefaultState(dist.group.WORLD), hook)


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("strategy", [*SHARDED, "no_shard"])
def test_torchs_own_hooks_train_like_plain(strategy, rank, world_size):
    pair = with_torchs_hook(MLP, rank, world_size, strategy)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
@pytest.mark.parametrize("sync", [True, *exhaustive(False)])
def test_micro_batches_are_accumulated(sync, rank, world_size):
    pair = with_torchs_hook(MLP, rank, world_size)

    def run(model, batches):
        with pair.engine.no_sync() if model is pair.model and not sync else contextlib.nullcontext():
            for x in batches[:-1]:
                plain_backward(model, x)
        plain_backward(model, batches[-1])

    for step in range(2):
        pair.step(run, [batch(rank, 10 * step + i) for i in range(3)])
    pair.check()


class Compress:
    """bf16 or fp16 on the way, as torch's compression hooks do it, which need a GPU."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.sizes = dtype, []

    def __call__(self, state, grad, output=None):
        low = (grad / dist.get_world_size()).to(self.dtype)
        self.sizes.append((grad.numel(), None if output is None else output.numel()))
        if output is None:
            dist.all_reduce(low)
            grad.data = low.to(grad.dtype)
            return
        into = torch.empty(output.numel(), dtype=self.dtype)
        dist.reduce_scatter_tensor(into, low)
        output.data = into.to(output.dtype)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(torch.float16)])
@pytest.mark.parametrize("strategy", [*SHARDED, "no_shard"])
def test_compression_that_replaces_what_it_is_given(strategy, dtype, rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    hook = Compress(dtype)
    engine = torch_shard.shard(model, strategy=strategy, unit_bytes=300)
    engine.register_comm_hook(None, hook)
    for m in (model, plain):
        loss_of(m(batch(rank, 0).float())).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = (q.grad / world_size).to(dtype)
        dist.all_reduce(expected)
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad.full_tensor(), expected.float(), rtol=2**-7, atol=1e-3, msg=name)
    flats = [flat for unit in engine.units for flat in unit.flats]
    assert sorted(n for n, _ in hook.sizes) == sorted(flat.layout.numel for flat in flats)


@ranks(2)
@pytest.mark.parametrize("settings", [{}, {"strategy": "no_shard"}, {"strategy": "hybrid_shard", "shard_size": 1}])
def test_compression_by_a_front_end(settings, rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model, **settings)
    compress_gradients(engine, torch.bfloat16)
    for m in (model, plain):
        loss_of(m(batch(rank, 0).float())).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        expected = (q.grad / world_size).to(torch.bfloat16)
        dist.all_reduce(expected)
        grad = p.grad.full_tensor()
        assert torch.equal(grad, grad.to(torch.bfloat16).float()), name  # it was summed in 16 bits
        torch.testing.assert_close(grad, expected.float(), rtol=2**-7, atol=1e-3, msg=name)


class PowerSGD:
    """Rank-one gradients with error feedback (Vogels et al., 2019), reduced as two vectors."""

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}
        self.call = 0

    def __call__(self, state, grad, output):
        key, self.call = self.call, self.call + 1
        world, rank = dist.get_world_size(), dist.get_rank()
        width = next(w for w in range(int(grad.numel() ** 0.5), 0, -1) if grad.numel() % w == 0)
        matrix = (grad / world + self.errors.get(key, 0)).view(-1, width)
        q = torch.linspace(1, 2, width, dtype=grad.dtype)
        for _ in range(3):
            p = matrix @ q
            dist.all_reduce(p)
            p = p / (p.norm() + 1e-12)
            q = matrix.t() @ p
            mine = q.clone()
            dist.all_reduce(q)
        self.errors[key] = (matrix - torch.outer(p, mine)).view(-1)
        output.copy_(torch.outer(p, q).view(-1)[rank * output.numel() : (rank + 1) * output.numel()])


@pytest.mark.exhaustive
@ranks(2)
def test_a_hook_with_state_of_its_own_for_each_call(rank, world_size):
    """Rank-one gradients with error feedback train a model almost as whole ones do."""
    losses = {}
    for compressed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        engine = torch_shard.shard(model, units=[nn.Linear])
        hook = PowerSGD()
        if compressed:
            engine.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(60):
            hook.call = 0
            x = batch(rank, step % 4)
            loss = (model(x) - x[:, :3].sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            first = loss.item() if step == 0 else losses[compressed][0]
            losses[compressed] = first, loss.item()
    assert losses[True][1] < 0.35 * losses[True][0]
    assert losses[True][1] < 2 * losses[False][1]


@ranks(2)
def test_gradients_come_in_the_dtype_of_the_reduction(rank):
    seen = []

    def hook(state, grad, output):
        seen.append((grad.dtype, output.dtype))
        default_hooks.reduce_scatter_hook(state, grad, output)

    model = MLP()
    engine = torch_shard.shard(model, precision=torch.bfloat16)
    engine.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
    loss_of(model(batch(rank, 0).float())).backward()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@ranks(1)
def test_one_rank_alone_needs_no_hook(rank, world_size):
    def hook(*_):
        raise AssertionError

    pair = with_hook(Pair(MLP, rank, world_size), None, hook)
    pair.step(plain_backward, batch(rank, 0))


def other_size(state, grad, output):
    output.data = output.new_zeros(output.numel() + 1)


@ranks(2)
def test_what_can_not_be_is_an_error_on_all_ranks(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    with pytest.raises(ConfigError, match=r"^hook must be callable"):
        pair.engine.register_comm_hook(None, "allreduce")
    with pair.engine.no_sync():
        plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(UnitStateError, match=r"no_sync\(\)"):
        pair.engine.register_comm_hook(None, default_hooks.reduce_scatter_hook)
    pair.optimizer.zero_grad()
    plain_backward(pair.model, batch(rank, 0))
    pair.optimizer.zero_grad()
    with pytest.raises(DivergenceError, match="register_comm_hook"):
        pair.engine.register_comm_hook(None, (other_size, default_hooks.reduce_scatter_hook)[rank])
    pair.engine.register_comm_hook(None, other_size)
    with pytest.raises(ConfigError, match="registered already"):
        pair.engine.register_comm_hook(None, default_hooks.reduce_scatter_hook)
    with pytest.raises(ShardError, match="other_size left a gradient"):
        plain_backward(pair.model, batch(rank, 0))


@ranks(2)
def test_a_copy_of_the_model_keeps_the_hook(rank, world_size):
    pair = with_torchs_hook(MLP, rank, world_size)
    pair.model = copy.deepcopy(pair.model)
    pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    assert all(f.gradients.hook is not None for u in torch_shard.engine_of(pair.model).units for f in u.flats)
    pair.step(plain_backward, batch(rank, 0))
    pair.check()


class OnOneRank(nn.Module):
    """A unit whose gradient only one rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x, uses):
        h = self.first(x)
        k = self.middle(h)
        return self.last(k if uses else h)


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", [*SHARDED, "no_shard"])
def test_a_unit_that_only_one_rank_has_a_gradient_of(strategy, rank, world_size):
    pair = with_torchs_hook(OnOneRank, rank, world_size, strategy, units=[nn.Linear])
    for step in range(4):
        pair.step(lambda model, x, step=step: plain_backward(model, x, step == 0 or rank == 0), batch(rank, step))
    pair.check()


@ranks(2)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_both_and_training_goes_on(rank, world_size):
    fails = [False]

    def hook(state, grad, output):
        default_hooks.reduce_scatter_hook(state, grad, output)
        if fails[0] and rank == 1:
            raise ZeroDivisionError("the hook's own")

    pair = with_hook(Pair(MLP, rank, world_size), default_hooks.DefaultState(dist.group.WORLD), hook)
    pair.step(plain_backward, batch(rank, 0))
    fails[0] = True
    with pytest.raises(ZeroDivisionError if rank else ShardError, match="the hook's own"):
        plain_backward(pair.model, batch(rank, 1))
    fails[0] = False
    pair.optimizer.zero_grad()
    pair.step(plain_backward, batch(rank, 2))
    pair.check()


@ranks(2)
def test_a_hook_may_keep_what_it_is_given(rank, world_size):
    kept = []

    def hook(state, grad, output):
        kept.append((grad, grad.clone()))
        default_hooks.reduce_scatter_hook(state, output.new_zeros(grad.numel()), output)

    pair = with_hook(Pair(lambda: MLP(blocks=5), rank, world_size), default_hooks.DefaultState(dist.group.WORLD), hook)
    plain_backward(pair.model, batch(rank, 0))
    assert len(kept) > 3 and all(torch.equal(a, b) for a, b in kept)
