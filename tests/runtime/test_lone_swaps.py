"""One rank puts averaged weights into the model, reads it alone, and puts the weights of before back, as under DDP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.runtime.test_lone_reads import TOKENS, elsewhere, file_of, made, same, train, values
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import DivergenceError

Params = Iterable[torch.Tensor]


def one_by_one(params: Params, sources: Params) -> None:
    for p, source in zip(params, sources, strict=True):
        p.data.copy_(source.to(p.device).data)


def by_foreach(params: Params, sources: Params) -> None:
    torch._foreach_copy_([p.data for p in params], [source.to(p.device).data for p, source in zip(params, sources)])  # noqa: B905


def by_assignment(params: Params, sources: Params) -> None:
    for p, source in zip(params, sources, strict=True):
        p.data = source.data


def without_gradients(params: Params, sources: Params) -> None:
    with torch.no_grad():
        for p, source in zip(params, sources, strict=True):
            p.copy_(source)


WAYS: dict[str, Callable[[Params, Params], None]] = {
    "one by one": one_by_one, "by foreach": by_foreach, "by assignment": by_assignment, "without gradients": without_gradients,
}  # fmt: skip


class Average:
    """A running average of full plain tensors, with the methods of diffusers' EMAModel."""

    def __init__(self, params: Params, way: str) -> None:
        self.shadow = [p.detach().clone() for p in params]
        self.way = WAYS[way]

    def store(self, params: Params) -> None:
        self.stored = [p.detach().cpu().clone() for p in params]

    def copy_to(self, params: Params) -> None:
        self.way(list(params), self.shadow)

    def restore(self, params: Params) -> None:
        self.way(list(params), self.stored)


def averages(plain: nn.Module, way: str) -> tuple[Average, Average]:
    """An average of the sharded model's weights, and of the plain one's, which have the same values."""
    found = []
    for _ in range(2):
        average = Average(plain.parameters(), way)
        for value in average.shadow:
            value.mul_(0.9).add_(0.01)
        found.append(average)
    return found[0], found[1]


@pytest.mark.parametrize("where", ["in the next step", *exhaustive("in a barrier", "computing")])
@pytest.mark.parametrize("way", quick(WAYS, ["one by one", "by foreach"]))
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim", *exhaustive("shard_grad_op")])
@ranks(2, exhaustive=(3,))
def test_one_rank_reads_averaged_weights_and_training_goes_on_without_them(rank, strategy, way, where):
    sharded, engine, plain = made(strategy)
    for _ in range(2):
        ours, theirs = averages(plain, way)
        if rank == 0:
            for average, model in ((ours, sharded), (theirs, plain)):
                average.store(model.parameters())
                average.copy_to(model.parameters())
            same(values(sharded), values(plain))
            same(sharded.embed.weight.norm(), plain.embed.weight.norm())
            same(file_of(sharded), plain.state_dict())
            same(engine.state_dict(), plain.state_dict())
            for average, model in ((ours, sharded), (theirs, plain)):
                average.restore(model.parameters())
            same(values(sharded), values(plain))
        else:
            elsewhere(where)
        if where == "in a barrier" and rank == 0:
            dist.barrier()
        for model in (sharded, plain):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        same(values(sharded), values(plain))


class Aliases(Average):
    """Keeps the weights of before as ``p.data``, which plain torch leaves as they are when ``p.data`` is assigned others."""

    def store(self, params: Params) -> None:
        self.stored = [p.data for p in params]


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "shard_grad_op", "no_shard")])
@ranks(2, exhaustive=(3,))
def test_one_rank_keeps_the_weights_as_aliases_while_it_reads_averaged_ones(rank, strategy):
    sharded, _, plain = made(strategy)
    for _ in range(2):
        ours, theirs = (Aliases(plain.parameters(), "by assignment") for _ in range(2))
        for average in (ours, theirs):
            average.shadow = [value * 0.9 for value in average.shadow]
        if rank == 0:
            for average, model in ((ours, sharded), (theirs, plain)):
                average.store(model.parameters())
                average.copy_to(model.parameters())
            same(values(sharded), values(plain))
            for average, model in ((ours, sharded), (theirs, plain)):
                average.restore(model.parameters())
            same(values(sharded), values(plain))
            same(file_of(sharded), plain.state_dict())
        for model in (sharded, plain):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        same(values(sharded), values(plain))


@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim"])
@ranks(2, exhaustive=(3,))
def test_all_ranks_swap_and_one_of_them_reads_alone_or_late(rank, strategy):
    sharded, _, plain = made(strategy)
    ours, theirs = averages(plain, "by foreach")
    for turn in range(4):
        time.sleep(0.4 * (turn == 1 + rank))
        for average, model in ((ours, sharded), (theirs, plain)):
            average.store(model.parameters())
            average.copy_to(model.parameters())
        if turn < 3 or rank == 0:
            same(values(sharded), values(plain))
        for average, model in ((ours, sharded), (theirs, plain)):
            average.restore(model.parameters())
        same(values(sharded), values(plain))
        for model in (sharded, plain):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@ranks(2)
def test_averages_of_other_precision_are_read_as_they_were_stored(rank):
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    torch_shard.shard(sharded, units=["0"], precision=Precision(param_dtype=torch.bfloat16), alone_after=0.1)
    full = [torch.randn(p.shape, dtype=torch.float64) for p in sharded.parameters()]
    if rank == 0:
        stored = [p.detach().clone() for p in sharded.parameters()]
        one_by_one(sharded.parameters(), full)
        with torch.no_grad():
            got = sharded(torch.ones(2, 6))
            expected = torch.ones(2, 6, dtype=torch.bfloat16)
            for weight, bias in ((full[0], full[1]), (full[2], full[3])):
                expected = nn.functional.linear(expected, weight.float().bfloat16(), bias.float().bfloat16())
        torch.testing.assert_close(got.float(), expected.float())
        same(sharded[0].weight.full_tensor(), full[0].float())
        one_by_one(sharded.parameters(), stored)
    else:
        time.sleep(0.5)
    sharded(torch.ones(2, 6)).sum().backward()


def swapped(sharded: nn.Module, values: list[torch.Tensor]) -> None:
    one_by_one(sharded.parameters(), values)


REFUSED: dict[str, Callable[[nn.Module, list[torch.Tensor], list[Any]], None]] = {
    "not taken back": lambda model, full, stored: None,
    "one not taken back": lambda model, full, stored: one_by_one(list(model.parameters())[1:], stored[1:]),
    "taken back with other values": lambda model, full, stored: one_by_one(
        model.parameters(), [s.add_(1) for s in stored]
    ),
    "shards of another parameter": lambda model, full, stored: model.blocks[0][0].weight.data.copy_(
        model.blocks[1][0].weight.data.clone()
    ),
}


@pytest.mark.parametrize("case", quick(REFUSED, ["one not taken back", "taken back with other values"]))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim")])
@ranks(2)
def test_weights_that_are_not_those_of_before_are_not_trained_with(rank, strategy, case):
    sharded, _, plain = made(strategy)
    full = averages(plain, "by foreach")[0].shadow
    if rank == 0:
        stored = [p.detach().clone() for p in sharded.parameters()]
        swapped(sharded, full)
        REFUSED[case](sharded, full, stored)
    with pytest.raises(DivergenceError, match="the same changes"):
        train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


@ranks(2)
def test_shards_of_before_a_load_are_not_those_of_now(rank, tmp_path):
    sharded, engine, _ = made()
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    for name in ("one", "two"):
        engine.save(tmp_path / name)
        train(sharded, optimizer)
    engine.load(tmp_path / "one")
    stored = [p.detach().clone() for p in sharded.parameters()]
    engine.load(tmp_path / "two")
    if rank == 0:
        swapped(sharded, stored)
    with pytest.raises(DivergenceError, match="the same changes"):
        train(sharded, optimizer)


@ranks(2)
def test_full_tensors_that_differ_in_their_shapes_only(rank):
    sharded, _, plain = made()
    both = (sharded, plain)
    stored = [[p.detach().clone() for p in model.parameters()] for model in both]
    if rank == 0:
        for model in both:
            by_foreach(list(model.parameters()), [torch.zeros(p.shape) for p in model.parameters()])
        same(file_of(sharded), plain.state_dict())
        for model, before in zip(both, stored, strict=True):
            swapped(model, before)
    for model in both:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(values(sharded), values(plain))


@pytest.mark.parametrize("case", ["an operation", *exhaustive("a source that has changed", "a step of the others")])
@ranks(2)
def test_a_lone_read_is_an_error_where_the_values_are_not_known(rank, case):
    sharded, _, plain = made(timeout=3.0)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded.train()
    sharded(TOKENS).square().mean().backward()
    full = averages(plain, "by foreach")[0].shadow
    if rank > 0:
        if case == "a step of the others":
            optimizer.step()
        time.sleep(1)
        return
    swapped(sharded, full)
    if case == "an operation":
        with torch.no_grad():
            sharded.scale.mul_(2)
    elif case == "a source that has changed":
        full[0].mul_(2)
    with pytest.raises(DivergenceError, match="reads the model alone"):
        values(sharded)


@ranks(2)
def test_tensors_that_fill_a_model_one_by_one_are_let_go(rank):
    """On each rank all of them together would be the memory that sharding saves."""
    sharded, engine, _ = made()
    edits = runtime_of(engine).versions.edits
    for n, p in enumerate(sharded.parameters()):
        p.data.copy_(torch.full(p.shape, float(n + 1)))
        assert len(edits._sources) <= 1
    kept = [torch.full(p.shape, float(n + 1)) for n, p in enumerate(sharded.parameters())]
    for p, value in zip(sharded.parameters(), kept, strict=True):
        p.data.copy_(value)
    sharded.train()
    sharded(TOKENS).square().mean().backward()
    assert not edits._sources
    assert not edits.before


@pytest.mark.parametrize("settings", [{}, *exhaustive({"offload": "cpu"}, {"strategy": "shard_optim"})], ids=str)
@ranks(3)
def test_each_rank_reads_the_values_that_it_has_itself(rank, settings):
    sharded, _, plain = made(norm=nn.LayerNorm, **settings)
    both = (sharded, plain)
    stored = [[p.detach().clone() for p in model.parameters()] for model in both]
    full = averages(plain, "by foreach")[0].shadow
    for turn in range(3):
        if rank != turn:  # two ranks have values of their own
            for model in both:
                swapped(model, [value + rank for value in full])
            time.sleep(0.3 * rank)
        same(values(sharded), values(plain))
        for model, before in zip(both, stored, strict=True):
            swapped(model, before)
    for model in both:
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    same(values(sharded), values(plain))
