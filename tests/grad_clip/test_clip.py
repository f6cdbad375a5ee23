"""Clipping: the same norms and gradients as torch.nn.utils on the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.odd_model import assert_grads, batch, build, reference_grads, trained
from tests.support.ranks import ranks
from torch_shard.errors import NonFiniteError, ShardError

INF = float("inf")


@pytest.mark.parametrize("p", [2.0, *exhaustive(1.0), 3.5, *exhaustive(0.5), INF, *exhaustive(0.0, -1.0)])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2, exhaustive=(1, 3))
def test_norms_of_every_order(p: float, strategy: str, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, strategy=strategy)
    plain.empty.grad = None if p < 0 else plain.empty.grad  # torch itself refuses the empty one there
    model.empty.grad = None if p < 0 else model.empty.grad
    if p == INF:
        plain.empty.grad = model.empty.grad = None
    for max_norm in (1e-3, 1e3):
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), max_norm, p)
        found = engine.clip_grad_norm_(max_norm, p)
        torch.testing.assert_close(found, expected)
        assert_grads(model, plain)


@ranks(2)
def test_a_subset_and_the_rest(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    for first, second in ((plain.blocks[0], model.blocks[0]), (plain.head, model.head)):
        expected = torch.nn.utils.clip_grad_norm_(first.parameters(), 1e-3)
        torch.testing.assert_close(engine.clip_grad_norm_(1e-3, parameters=second.parameters()), expected)
        assert_grads(model, plain)
    expected = torch.nn.utils.clip_grad_norm_(plain.scale, 1e-4)
    torch.testing.assert_close(engine.clip_grad_norm_(1e-4, parameters=model.scale), expected)
    assert_grads(model, plain)
    assert engine.clip_grad_norm_(1.0, parameters=[]).item() == 0.0
    assert engine.clip_grad_norm_(1.0, parameters=[model.frozen]).item() == 0.0


@ranks(2)
def test_tied_parameters_count_once(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    twice = [model.head.weight, model.embed.weight, model.head.weight]
    expected = torch.linalg.vector_norm(plain.embed.weight.grad)
    torch.testing.assert_close(engine.clip_grad_norm_(1e9, parameters=twice), expected)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 5), nn.Linear(5, 7).to(torch.bfloat16), nn.Linear(7, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x).to(torch.bfloat16)).double())


@pytest.mark.parametrize("p", [2.0, *exhaustive(INF)])
@ranks(3, exhaustive=(2,))
def test_several_dtypes(p: float, rank: int, world_size: int) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Mixed())
    plain, model = models
    engine = torch_shard.shard(model)
    x = torch.randn(4, 3)
    plain(x).pow(2).sum().backward()
    model(x).pow(2).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1, p)
    found = engine.clip_grad_norm_(0.1, p)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=0)
    for q, r in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), r.grad, rtol=2e-2, atol=1e-4)


@ranks(2)
def test_ignored_parameters_count_once(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, ignore=["scale", "conv.*"])
    for name in ("scale", "conv.weight"):  # the user reduces what the engine is told to ignore
        model.get_parameter(name).grad = plain.get_parameter(name).grad.clone()
    for p in (2.0, INF, 0.0):
        expected = torch.nn.utils.clip_grad_norm_([q for q in plain.parameters() if q.numel()], 1e-3, p)
        torch.testing.assert_close(engine.clip_grad_norm_(1e-3, p), expected)
        assert_grads(model, plain)


class Beside(nn.Module):
    """A parameter outside the shards, of a dtype of its own, that some ranks may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.extra = nn.Parameter(torch.full((3,), 5.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.head(torch.tanh(self.inp(x))).double()
        return y * self.extra if use else y


@pytest.mark.parametrize("users", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("p", [2.0, INF, *exhaustive(0.0, 1.0, -1.0)])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2, exhaustive=(3,))
def test_ignored_parameters_that_some_ranks_leave_out(
    strategy: str, p: float, users: tuple[int, ...], rank: int, world_size: int
) -> None:
    torch.manual_seed(0)
    model = Beside()
    engine = torch_shard.shard(model, unit_bytes=256, ignore=["extra"], strategy=strategy, timeout=20.0)
    model(torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)), rank in users).pow(2).mean().backward()
    grads = [q.grad.full_tensor() for q in model.parameters() if q is not model.extra]
    seen: list[Any] = [None] * world_size
    dist.all_gather_object(seen, model.extra.grad)
    reference = [torch.zeros_like(g) for g in (*grads, *seen[:1]) if g is not None]
    for r, g in zip(reference, [*grads, *seen[:1]], strict=False):
        r.grad = g.clone()
    expected = torch.nn.utils.clip_grad_norm_(reference, 1e-3, p)
    found = engine.clip_grad_norm_(1e-3, p)
    torch.testing.assert_close(found, expected.double())
    for q, r in zip([q for q in model.parameters() if q is not model.extra], reference, strict=False):
        torch.testing.assert_close(q.grad.full_tensor(), r.grad)
    own = seen[rank]  # the same factor as all the others
    if own is not None:
        torch.testing.assert_close(model.extra.grad, own * torch.clamp(1e-3 / (expected.double() + 1e-6), max=1.0))
    dist.all_gather_object(seen, found.item())
    assert len(set(seen)) == 1


@pytest.mark.parametrize("p", [2.0, 0.0])
@ranks(2)
def test_a_gradient_cleared_on_one_rank_is_no_hang(p: float, rank: int, world_size: int) -> None:
    _, model, engine = trained(world_size, rank, timeout=20.0)
    if rank == 0:
        model.blocks[0][0].weight.grad = None
    norms: list[Any] = [None] * world_size
    dist.all_gather_object(norms, engine.clip_grad_norm_(1e-3, p).item())
    assert len(set(norms)) == 1


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2)
def test_plain_parameters_alone(strategy: str, rank: int, world_size: int) -> None:
    model = Beside()
    engine = torch_shard.shard(model, ignore=["extra"], strategy=strategy, timeout=20.0)
    model.extra.grad = None if rank else torch.full((3,), 2.0, dtype=torch.float64)
    for p in (2.0, 0.0):
        expected = 3**0.5 * 2 if p else 1.0
        assert engine.clip_grad_norm_(1e9, p, parameters=[model.extra]).item() == pytest.approx(expected)


@ranks(2)
def test_replaced_and_missing_gradients(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    for net in (plain, model):
        net.scale.grad = None
        net.blocks[0][0].bias.grad = torch.full((11,), 2.0)
        net.blocks[1][0].bias.grad = torch.zeros(11)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
    torch.testing.assert_close(engine.clip_grad_norm_(1e-2), expected)
    assert_grads(model, plain)


@pytest.mark.parametrize("bad", [float("nan"), *exhaustive(INF)])
@ranks(2)
def test_nonfinite_norms(bad: float, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    plain.blocks[0][0].bias.grad[3] = bad
    model.blocks[0][0].bias.grad = plain.blocks[0][0].bias.grad.clone()
    with pytest.raises(NonFiniteError, match="no gradient was changed"):
        engine.clip_grad_norm_(1e-3, error_if_nonfinite=True)
    assert_grads(model, plain)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    found = engine.clip_grad_norm_(1e-3)
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert_grads(model, plain)
    # After such a step a norm of clean gradients is clean: the padding between parameters holds no NaN.
    for net in (plain, model):
        net.zero_grad(set_to_none=False)
    assert engine.clip_grad_norm_(1.0).item() == 0.0
    reference_grads(plain, world_size)
    model(batch(rank)).pow(2).mean().backward()
    torch.testing.assert_close(engine.clip_grad_norm_(1e-3), torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-3))
    assert_grads(model, plain)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(1, 2)
def test_clipping_by_value(strategy: str, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, strategy=strategy)
    torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    engine.clip_grad_value_(1e-3)
    assert_grads(model, plain)


@pytest.mark.parametrize(
    ("strategy", "others"),
    [("full_shard", "no_shard"), *exhaustive(("full_shard", "full_shard"), ("no_shard", "full_shard"))],
)
@ranks(2)
def test_two_engines_in_one_call(strategy: str, others: str, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, strategy=strategy)
    other_plain, other, _ = trained(world_size, rank, strategy=others)
    everything = [*model.parameters(), *other.parameters()]
    expected = torch.nn.utils.clip_grad_norm_([*plain.parameters(), *other_plain.parameters()], 1e-3)
    torch.testing.assert_close(engine.clip_grad_norm_(1e-3, parameters=everything), expected)
    assert_grads(model, plain)
    assert_grads(other, other_plain)


@ranks(2)
def test_large_gradients_are_summed_precisely() -> None:
    model = nn.Linear(1500, 1500, bias=False)
    engine = torch_shard.shard(model)
    grad = torch.rand(1500, 1500, generator=torch.Generator().manual_seed(0))
    model.weight.grad = grad
    exact = torch.linalg.vector_norm(grad.double()).item()
    assert abs(engine.clip_grad_norm_(1e9).item() / exact - 1) < 1e-6


@ranks(2)
def test_clipping_what_no_sync_holds_is_an_error(rank: int) -> None:
    model = build()
    engine = torch_shard.shard(model)
    with engine.no_sync():
        model(batch(rank)).pow(2).mean().backward()
    with pytest.raises(ShardError, match="no_sync"):
        engine.clip_grad_norm_(1.0)


@ranks(2)
def test_tiny_gradients_are_clipped_as_torch_does(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    for p in (*plain.parameters(), *model.parameters()):
        if p.grad is not None:
            p.grad.mul_(1e-9)  # to about the 1e-6 that torch adds to the norm
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-7)
    torch.testing.assert_close(engine.clip_grad_norm_(1e-7), expected)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=0)


@ranks(2)
def test_a_norm_that_is_nan_makes_every_gradient_nan(rank: int, world_size: int) -> None:
    _, model, engine = trained(world_size, rank)
    with torch.no_grad():
        model.scale.grad.fill_(float("nan"))
    engine.clip_grad_norm_(1.0)
    for name, p in model.named_parameters():
        assert p.grad is None or p.grad.full_tensor().isnan().all(), name
    # The padding between parameters is none of them: it stays zero, so that it does not spoil the next norm.
    for p in model.parameters():
        if p.grad is not None:
            p.grad.zero_()
    assert engine.clip_grad_norm_(1.0).item() == 0.0
