"""The search for settings that fit."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from tests.plan.test_trace_step import Gpt
from torch_shard import Precision, ShardConfig
from torch_shard.errors import BudgetError, ConfigError, TraceError
from torch_shard.plan import Search, search
from torch_shard.plan.settings_search import OUTSIDE

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


def test_with_enough_memory_the_model_is_replicated_and_keeps_its_activations() -> None:
    best = found(1000, ranks=4).best
    assert best.candidate.strategy in ("no_shard", "shard_optim")
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
    with pytest.raises(BudgetError, match=r"no settings fit 19\.00 MiB\. full_shard.* lacks least, .*Use more ranks"):
        assert result.best
    assert "(lacks " in result.table()


def test_the_fastest_that_fits_comes_first() -> None:
    result = found(1000)
    fitting = [each for each in result.estimates if each.fits]
    assert fitting == list(result.estimates)[: len(fitting)]
    assert [each.seconds for each in fitting] == sorted(each.seconds for each in fitting)


def test_several_nodes_try_replicas_on_each_and_devices_try_offload() -> None:
    result = found(80_000, "cuda", ranks=16, ranks_per_node=8)
    strategies = {(each.candidate.strategy, each.candidate.shard_size) for each in result.estimates}
    assert ("hybrid_shard", 8) in strategies
    by_settings = {str(each.candidate): each for each in result.estimates}
    kept, offloaded = (by_settings[f"full_shard, prefetch 1{more}"] for more in ("", ", offload"))
    assert offloaded.nbytes < kept.nbytes
    assert offloaded.seconds > kept.seconds
    assert offloaded.host_nbytes > kept.host_nbytes == 0
    assert result.budget == int(80_000 * MIB * 0.95) - OUTSIDE


def test_low_precision_takes_less() -> None:
    plain, mixed = (
        {str(each.candidate): each for each in found(1000, config=ShardConfig(precision=precision)).estimates}
        for precision in (None, Precision(torch.bfloat16))
    )
    assert mixed["full_shard, prefetch 1"].nbytes < 0.8 * plain["full_shard, prefetch 1"].nbytes


def test_one_rank_shards_nothing() -> None:
    assert {each.candidate.strategy for each in found(1000, ranks=1).estimates} == {"no_shard"}
    offloaded = {each.candidate.strategy for each in found(80_000, "cuda", ranks=1).estimates if each.candidate.offload}
    assert offloaded == {"no_shard", "full_shard"}


@pytest.mark.parametrize(
    ("argument", "value"), [("ranks", 0), ("batch", -1), ("margin", 1.0), ("margin", -0.1), ("ranks_per_node", 0)]
)
def test_arguments_out_of_range(argument: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{argument} must be"):
        found(1000, **{argument: value})


def test_a_step_that_cannot_be_traced_says_where() -> None:
    with pytest.raises(TraceError, match=r"nonzero.* at .*test_search\.py"):
        search(nn.Linear(4, 4), lambda model: model(torch.randn(4, 4)).nonzero(), memory=MIB, ranks=2, on="cpu")


def test_the_public_name_is_the_function_and_training_does_not_load_it() -> None:
    program = (
        "import sys, torch_shard, torch_shard.plan as plan;"
        "assert 'torch_shard.plan.settings_search' not in sys.modules;"
        "assert plan.search is plan.search and callable(plan.search) and plan.Search.__name__ == 'Search'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
