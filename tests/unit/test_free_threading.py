"""Where reference counts don't tell who holds what (builds of Python without the GIL), everything counts as held."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

import torch_shard
from tests.comm.test_traffic import EMBEDDING, ITEM, UNITS, Chain, bytes_of_a_step, tokens
from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.compat.test_escapes import UsesAKeptWeight
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.versions import counts_references


@contextmanager
def without_counts() -> Iterator[None]:
    """Inside, engines are made as on a build of Python without the GIL, where counts to compare with may be too high."""
    with (
        mock.patch("torch_shard.comm.collectives.counts_references", return_value=False),
        mock.patch("torch_shard.unit.flat_buffer.sys.getrefcount", return_value=1000),
    ):
        yield


def test_counts_are_read_on_builds_with_the_gil_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 0}.get)
    assert counts_references()
    # Whether the GIL happens to run there makes no difference to how references are counted.
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert not counts_references()


@ranks(2)
def test_backward_gathers_what_it_may_need_and_trains_like_plain(rank: int, world_size: int) -> None:
    with without_counts():
        pair = Pair(Chain, rank, world_size, units=UNITS)
    pair.engine.reset_peak_gathered()
    for step in range(3):
        before = pair.engine.bytes_sent
        with without_counts():
            pair.step(plain_backward, tokens(rank, step))
        # The embedding's backward needs no values, which nothing but a count can tell.
        more = EMBEDDING * ITEM * (world_size - 1) // world_size
        assert pair.engine.bytes_sent - before == bytes_of_a_step("full_shard", world_size, layers=5) + more
    whole = sum(unit.full_bytes for unit in pair.engine.units)
    assert pair.engine.statistics().gathered == 0
    # A Python object may hold any unsharded parameter, and use it in backward whatever else has run by then.
    assert pair.engine.statistics().peak_gathered == whole
    pair.check()


@pytest.mark.parametrize("build", [UsesAKeptWeight, *exhaustive(MLP)])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(2)
def test_a_weight_that_was_put_aside_trains_like_plain(build, strategy, rank: int, world_size: int) -> None:
    with without_counts():
        pair = Pair(build, rank, world_size, strategy=strategy, unit_bytes=100)
        for step in range(3):
            pair.step(plain_backward, batch(rank, step))
    pair.check()


@pytest.mark.parametrize("counts", [True, False])
@ranks(1)
def test_a_unit_that_is_never_gathered_is_stepped_in_backward_only_where_counts_tell(counts: bool, rank: int) -> None:
    torch.manual_seed(0)
    model = MLP().double()
    with nullcontext() if counts else without_counts():
        engine = torch_shard.shard(model, unit_bytes=300)
    engine.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.head.weight
    before, early = weight.to_local().clone(), []

    def look(*_: torch.Tensor) -> None:
        early.append(not torch.equal(weight.to_local(), before))

    x = model.inp(batch(rank, 0))
    x.register_hook(look)  # called when the backward of all that follows has run
    x = model.blocks[0](x)
    model.head(x).sum().backward()
    assert early == [counts]
    assert not torch.equal(weight.to_local(), before)
