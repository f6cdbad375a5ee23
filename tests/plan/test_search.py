"""The search for settings that fit."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.test_trace_step import Block, Gpt
from torch_shard import Offload, Precision, ShardConfig, make_plan
from torch_shard.errors import BudgetError, ConfigError, TraceError
from torch_shard.plan import Estimate, Search, search
from torch_shard.plan.devices import DEVICES
from torch_shard.plan.hardware import OUTSIDE

MIB = 1 << 20


def gpt() -> Gpt:
    with torch.device("meta"):
        return Gpt(layers=6, width=256)


def found(memory: float, on: Any = "cpu", **settings: Any) -> Search:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(model: nn.Module, batch: int = 8) -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 100, (batch, 128), device=on)).float().square().mean().backward()
        optimizer.step()

    settings = {"ranks": 4, "optimizers": [optimizer], **settings}
    return search(model, step, memory=int(memory * MIB), on=on, **settings)


def test_with_enough_memory_nothing_is_gathered_or_computed_twice() -> None:
    best = found(1000, ranks=4).best
    assert best.candidate.strategy in ("no_shard", "shard_optim", "shard_grad_op")
    assert not best.candidate.checkpointing
    assert best.fits


def test_with_less_memory_more_is_sharded_then_recomputed() -> None:
    enough = [each for each in found(1000).estimates if each.candidate.strategy == "full_shard"]
    least = min(each.nbytes for each in enough) / MIB
    best = found(1.06 * least).best.candidate
    assert (best.strategy, best.checkpointing) == ("full_shard", False)
    best = found(0.9 * least).best.candidate
    assert best.checkpointing


@pytest.mark.exhaustive
def test_smaller_micro_batches_are_accumulated_where_recomputation_does_not_suffice() -> None:
    least = min(each.nbytes for each in found(1, batch=8).estimates if each.candidate.micro_batch == 4) / MIB
    best = found(1.06 * least, batch=8).best.candidate
    assert best.micro_batch is not None
    assert best.micro_batch <= 4
    assert best.accumulation * best.micro_batch == 8


def test_what_does_not_fit_says_what_it_lacks() -> None:
    result = found(20)
    lacks = [each.lacks for each in result.estimates]
    assert lacks == sorted(lacks)
    assert all(each.lacks == each.nbytes - result.budget > 0 for each in result.estimates)
    with pytest.raises(
        BudgetError, match=r"no settings fit 19\.00 MiB\. The closest is full_shard.*, which lacks .*Use more ranks"
    ):
        assert result.best
    assert "(lacks " in result.table()


@pytest.mark.parametrize(("momentum", "of_optimizer"), [(0.0, 0), (0.9, 1)])
def test_states_are_those_of_the_optimizer_in_use(momentum: float, of_optimizer: int) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        model(torch.randint(0, 100, (2, 16))).float().square().mean().backward()
        optimizer.step()

    result = search(model, step, memory=1 << 30, ranks=4, optimizers=[optimizer], on="cpu")
    predicted = make_plan(model, ShardConfig(), 4).predicted
    assert result.states == (2 + of_optimizer) * predicted.parameters


def test_the_fastest_that_fits_comes_first() -> None:
    result = found(1000)
    fitting = [each for each in result.estimates if each.fits]
    assert fitting == list(result.estimates)[: len(fitting)]
    # Times that differ by less than a percent are taken as equal.
    assert all(after.seconds > 0.99 * before.seconds for before, after in itertools.pairwise(fitting))


def test_several_nodes_try_replicas_on_each() -> None:
    result = found(80_000, "cuda", ranks=16, ranks_per_node=8)
    strategies = {(each.candidate.strategy, each.candidate.shard_size) for each in result.estimates}
    assert ("hybrid_shard", 8) in strategies
    assert result.budget == int(80_000 * MIB * 0.95) - OUTSIDE


def on_gpu(budget: float, **settings: Any) -> dict[str, Estimate]:
    """Return the estimates for a budget of so many MiB on GPUs, by settings."""
    result = found((budget + (OUTSIDE >> 20)) / 0.95 + 1, "cuda", **settings)
    return {str(each.candidate): each for each in result.estimates}


# Activations of the model below take more than 90 MiB, and about 20 where they are recomputed.
def test_devices_try_offload_where_nothing_else_fits() -> None:
    assert not [each for each in on_gpu(1000).values() if each.candidate.offload]
    tried = on_gpu(100)
    kept, optimizer, whole = (
        tried[f"full_shard, prefetch 1{more}"] for more in ("", ", offload of the optimizer", ", offload")
    )
    assert whole.nbytes < optimizer.nbytes < kept.nbytes
    assert min(whole.host_nbytes, optimizer.host_nbytes) > kept.host_nbytes == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize(("bandwidth", "offloads"), [(1e9, False), (1e12, True)])
def test_offload_costs_the_time_of_the_host_which_recomputation_may_not(bandwidth: float, offloads: bool) -> None:
    device = dataclasses.replace(DEVICES["h100"], host_memory_bandwidth=bandwidth)
    tried = on_gpu(150, device=device)
    offloaded, again = (tried[f"full_shard, prefetch 1, {how}"] for how in ("offload", "activation checkpointing"))
    assert offloaded.fits and again.fits and not tried["full_shard, prefetch 1"].fits
    assert (offloaded.seconds < again.seconds) == offloads
    best = next(iter(tried.values())).candidate
    assert (best.offload is not None, bool(best.checkpointing)) == (offloads, not offloads)


@pytest.mark.exhaustive
def test_where_activations_alone_are_too_much_one_strategy_tells_what_is_lacking() -> None:
    tried = on_gpu(1)
    assert [str(each.candidate) for each in tried.values() if not each.candidate.checkpointing] == [
        "full_shard, prefetch 0, offload"
    ]


@pytest.mark.exhaustive
def test_inputs_of_recomputed_layers_wait_in_host_memory_where_that_is_too_much() -> None:
    # A layer's input is 8 x 128 x 256 numbers of 4 bytes. On the device there are at most two of six.
    tried = on_gpu(60)
    kept, moved = (tried[f"full_shard, prefetch 1, activation checkpointing{more}"] for more in ("", " and offload"))
    assert moved.host_nbytes == pytest.approx(6 * MIB, abs=1000)  # with counters
    assert kept.nbytes - moved.nbytes >= 3 * MIB
    assert moved.seconds >= kept.seconds


@pytest.mark.exhaustive
def test_the_host_steps_once_for_all_micro_batches() -> None:
    device = dataclasses.replace(DEVICES["h100"], host_memory_bandwidth=1e6)  # all else takes no time beside it
    tried = on_gpu(60, batch=8, device=device).values()
    for offload in (Offload(), Offload(params=False)):
        seconds = {each.seconds for each in tried if each.candidate.offload == offload}
        assert max(seconds) < 1.01 * min(seconds)
    assert {each.candidate.accumulation for each in tried if each.candidate.offload} >= {1, 2}


@pytest.mark.exhaustive
def test_gradients_that_are_added_in_host_memory_arrive_beside_those_that_are_there() -> None:
    tried = on_gpu(60, batch=8)
    gradients = make_plan(gpt(), ShardConfig(), 4).predicted.gradients
    settings = "full_shard, prefetch 1, offload, activation checkpointing"
    once, twice = (tried[f"{settings}, {samples}"].host_nbytes for samples in ("8 samples", "2 x 4 samples"))
    assert twice - once == pytest.approx(gradients, rel=0.01)


def test_layers_that_recompute_by_themselves_are_left_alone() -> None:
    model = gpt()
    for block in model.blocks:
        block.gradient_checkpointing = True

    def step(model: nn.Module) -> None:
        model(torch.randint(0, 100, (8, 128))).float().square().mean().backward()

    result = search(model, step, memory=MIB, ranks=2, on="cpu")
    assert {each.candidate.checkpointing for each in result.estimates} == {False}


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ModuleList(Block(256) for _ in range(3))
        self.small = nn.ModuleList(Small() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.large, *self.small):
            x = block(x)
        return x


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_layers_of_one_class_recompute_where_that_suffices() -> None:
    def step(model: nn.Module) -> None:
        model(torch.randn(8, 128, 256)).square().mean().backward()

    def searched(nbytes: float) -> Search:
        return search(TwoKinds(), step, memory=int(nbytes / 0.95) + 1, ranks=2, on="cpu")

    plain = min(each.nbytes for each in searched(1 << 30).estimates)
    result = searched(0.75 * plain)
    assert result.best.candidate.checkpointing == ("Block",)
    tried = {each.candidate.checkpointing for each in result.estimates}
    assert tried == {False, ("Block",), ("Small",)}  # and not both, which costs more
    assert True in {each.candidate.checkpointing for each in searched(0.5 * plain).estimates}


def test_low_precision_takes_less() -> None:
    plain, mixed = (
        {str(each.candidate): each for each in found(1000, config=ShardConfig(precision=precision)).estimates}
        for precision in (None, Precision(torch.bfloat16))
    )
    assert mixed["full_shard, prefetch 1"].nbytes < 0.8 * plain["full_shard, prefetch 1"].nbytes


def test_one_rank_shards_nothing() -> None:
    assert {each.candidate.strategy for each in found(1000, ranks=1).estimates} == {"no_shard"}
    offloaded = {each.candidate.strategy for each in on_gpu(100, ranks=1).values() if each.candidate.offload}
    assert offloaded == {"no_shard", "full_shard"}


@pytest.mark.parametrize(
    ("argument", "value"), [("ranks", 0), ("batch", -1), ("margin", 1.0), ("margin", -0.1), ("ranks_per_node", 0)]
)
def test_arguments_out_of_range(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{argument} must be"):
        found(1000, **{argument: value})


def test_a_step_that_cannot_be_traced_says_where() -> None:
    says = (
        r"nonzero.* at .*test_search\.py(.|\n)*Parameters, gradients and Adam.s state alone are 8\.01 MiB on each rank"
    )
    with pytest.raises(TraceError, match=says):
        model = nn.Linear(1024, 1024)
        search(model, lambda model: model(torch.randn(4, 1024)).nonzero(), memory=MIB, ranks=2, on="cpu")


def test_the_public_name_is_the_function_and_training_does_not_load_it() -> None:
    program = (
        "import sys, torch_shard, torch_shard.plan as plan;"
        "assert 'torch_shard.plan.settings_search' not in sys.modules;"
        "assert plan.search is plan.search and callable(plan.search) and plan.Search.__name__ == 'Search'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
