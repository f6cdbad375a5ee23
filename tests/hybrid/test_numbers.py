"""``hybrid_shard`` and ``hybrid_shard_zero2`` give plain training's numbers. Four ranks are two nodes of two.

What programs do that are not about replicas, tests/compat runs under both, too, and tests/runtime against the reference.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import torch_shard
from tests.compat.harness import (
    MLP,
    Pair,
    average_grads,
    batch,
    loss_of,
    plain_backward,
    same_grads,
    same_params,
    train_both,
    whole,
)
from tests.hybrid.harness import TWO, same_copies
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

HYBRID = ["hybrid_shard", "hybrid_shard_zero2"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize("strategy", quick(HYBRID, ["hybrid_shard"]))
@ranks(4)
def test_it_trains_and_clips_like_plain(strategy, rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=adamw, strategy=strategy, shard_size=2)
    for step in range(4):
        pair.backward(plain_backward, batch(rank, step))
        same_grads(pair.model, pair.plain)
        norms = pair.engine.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        pair.update()
    pair.check()
    same_copies(pair.engine)


@ranks(4)
def test_norms_with_plain_parameters_are_one_on_all_ranks(rank, world_size):
    """What is ignored has gradients of each rank's own: rank 0's norm counts, also in the other copy."""
    model = MLP().double()
    engine = torch_shard.shard(model, ignore=["head.*"], unit_bytes=500, **TWO)
    loss_of(model(batch(rank, 0))).backward()
    norm = engine.clip_grad_norm_(0.1)
    everyone = [torch.empty_like(norm) for _ in range(world_size)]
    dist.all_gather(everyone, norm)
    assert all(torch.equal(norm, other) for other in everyone)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same_copies(engine)


@ranks(4)
def test_random_edits_leave_the_copies_equal(rank, world_size):
    torch.manual_seed(rank)
    model = MLP()
    engine = torch_shard.shard(model, **TWO)
    with engine.gathered(write=True), torch.no_grad():
        for p in model.parameters():
            p.normal_()
    same_copies(engine)
    with engine.gathered(write=True, ranks=[3]) as there, torch.no_grad():
        if rank == 3:
            for p in model.parameters():
                p.fill_(7.0)
    del there
    same_copies(engine)
    assert whole(model.head.weight).eq(7.0).all()


@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("no_shard")])
@ranks(4)
def test_edits_of_gradients_in_gathered_leave_the_copies_equal(strategy, rank, world_size):
    model = MLP()
    engine = torch_shard.shard(model, strategy=strategy, shard_size=2 if strategy == "hybrid_shard" else None)
    loss_of(model(batch(rank, 0).float())).backward()
    torch.manual_seed(rank)
    with engine.gathered(write=True, grads=True), torch.no_grad():
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape))
        if rank != 0:
            model.inp.bias.grad = None
        model.head.bias.grad = None if rank == 0 else torch.ones(3)
    assert model.inp.bias.grad is not None and model.head.bias.grad is None
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same_copies(engine)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", [torch.bfloat16, *exhaustive(torch.float16)])
@ranks(4)
def test_low_precision_keeps_the_copies_equal(precision, rank, world_size):
    torch.manual_seed(0)
    model = MLP(width=32)
    plain = copy.deepcopy(model).double()
    engine = torch_shard.shard(model, precision=precision, unit_bytes=2000, **TWO)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, plain)]
    for step in range(5):
        loss_of(model(batch(rank, step).float())).backward()
        loss_of(plain(batch(rank, step))).backward()
        average_grads(plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_copies(engine)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            whole(p).double(), q.detach(), rtol=0.03, atol=0.01, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.exhaustive
@ranks(4)
def test_an_overflow_in_one_copy_skips_the_step_of_all(rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    engine = torch_shard.shard(model, **TWO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [whole(p).clone() for p in model.parameters()]
    x = batch(rank, 0).float()
    if rank == 2:
        x[0, 0] = float("inf")
    scaler.scale(loss_of(model(x))).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    for p, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(whole(p), was)
    same_copies(engine)


@pytest.mark.exhaustive
@ranks(4)
def test_quantized_reductions_inside_a_copy(rank, world_size):
    """Between copies travel sums, in the dtype of the reduction, and the copies stay equal."""
    torch.manual_seed(0)
    model = MLP(width=40)
    plain = copy.deepcopy(model)
    quantized = torch_shard.Quantized(gradients="int8", error_feedback=False, min_size=1)
    engine = torch_shard.shard(model, quantized=quantized, unit_bytes=20000, **TWO)
    loss_of(model(batch(rank, 0).float())).backward()
    loss_of(plain(batch(rank, 0).float())).backward()
    average_grads(plain)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (whole(p.grad) - q.grad).abs().max() / q.grad.abs().max()
        assert error < 0.02, name
    own = sum(flat.shard.nbytes for unit in engine.units for flat in unit.flats)
    assert engine.bytes_sent_across == own
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    same_copies(engine)


@ranks(4)
@pytest.mark.exhaustive
def test_whole_matrix_optimizers_step_in_each_copy(rank, world_size):
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)

    pair = train_both(MLP, rank, world_size, optimizer=muon, **TWO)
    same_copies(pair.engine)
    state = pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)
    again = Pair(MLP, rank, world_size, optimizer=muon, **TWO)
    again.engine.load_optim_state_dict(again.optimizer, state)
    again.engine.load_state_dict(pair.engine.state_dict(rank0_only=False))
    for one in (pair, again):
        one.model.zero_grad()
        plain_backward(one.model, batch(rank, 7))
        one.optimizer.step()
    same_params(again.model, _as_plain(pair))


def _muon_of_one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([model.head.weight], lr=0.02)


@pytest.mark.exhaustive
@ranks(4)
def test_state_of_a_matrix_that_one_replica_has_is_refused(rank, world_size):
    """``optimizer.state_dict()`` of another strategy has the state at one rank of all."""
    pair = Pair(MLP, rank, world_size, optimizer=_muon_of_one)
    pair.backward(plain_backward, batch(rank, 0))
    pair.update()
    other = Pair(MLP, rank, world_size, optimizer=_muon_of_one, **TWO)
    other.optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    other.backward(plain_backward, batch(rank, 1))
    with pytest.raises(ShardError, match=r"have state of head.weight, .* which the others lack"):
        other.optimizer.step()


@ranks(4)
def test_shards_of_state_on_some_ranks_are_an_error_on_all(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=_muon_of_one, **TWO)
    pair.backward(plain_backward, batch(rank, 0))
    weight = pair.model.head.weight
    if rank == 2:
        pair.optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    with pytest.raises(ShardError, match=r"have state of head.weight, or shards of it, which the others lack"):
        pair.optimizer.step()


@ranks(4)
def test_a_step_in_backward(rank, world_size):
    pair = Pair(MLP, rank, world_size, **TWO)
    pair.engine.step_in_backward(pair.optimizer)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
    pair.check()
    same_copies(pair.engine)


def _as_plain(pair: Pair) -> nn.Module:
    twin = copy.deepcopy(pair.plain)
    twin.load_state_dict(pair.engine.state_dict(rank0_only=False))
    return twin


@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("hybrid_shard_zero2")])
@ranks(4)
def test_a_communication_hook_reduces_inside_and_the_engine_across(strategy, rank, world_size):
    pair = Pair(MLP, rank, world_size, strategy=strategy, shard_size=2)
    state = default_hooks.DefaultState(pair.engine.shard_group)
    pair.engine.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    same_copies(pair.engine)


class Slow(nn.Module):
    """Some ranks are slow in backward."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model, self.seconds = model, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(x)
        if self.seconds and y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds))
        return y


@pytest.mark.exhaustive
@ranks(4)
def test_two_models_in_one_backward_whose_reductions_are_under_way_together(rank, world_size):
    """Which of the reductions inside a copy ends first differs between the copies."""

    def train(models: list[nn.Module], average: Any) -> None:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for step in range(4):
            x = batch(rank, step)
            (loss_of(models[0](x)) + loss_of(models[1](x + 1))).backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                average(model)
                optimizer.step()
                optimizer.zero_grad()

    torch.manual_seed(0)
    plain: list[nn.Module] = [Slow(MLP().double(), 0.0), Slow(MLP(width=11).double(), 0.0)]
    ours = copy.deepcopy(plain)
    for i, model in enumerate(ours):
        torch_shard.shard(model, unit_bytes=300, **TWO)
        model.seconds = 0.05 * (rank == i or rank == 3 - i)
    train(plain, average_grads)
    train(ours, lambda _: None)
    for model, expected in zip(ours, plain, strict=True):
        same_params(model, expected)
