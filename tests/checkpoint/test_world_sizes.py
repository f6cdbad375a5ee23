"""A checkpoint, sharded or full, loads on any number of ranks, under any strategy, with any units: the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torch_shard
from tests.checkpoint.helpers import build, load, loads, same, save, saved_by, train, whole
from tests.compat.harness import MLP
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def of_all_sizes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sizes")
    for size in SIZES:
        run(size, saved_by, str(folder / f"from-{size}"), {})
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", SIZES)
def test_every_number_of_ranks_loads_what_every_other_has_saved(size, of_all_sizes):
    for first in SIZES:
        for file in (f"from-{first}", f"from-{first}.pt"):
            run(size, loads, str(of_all_sizes / file), {})


# Each strategy on both sides.
STRATEGIES = [
    (2, "full_shard", 3, "no_shard"),
    (4, "hybrid_shard", 3, "full_shard"),  # two replicas on two ranks each
    *exhaustive(
        (3, "no_shard", 2, "shard_grad_op"),
        (2, "shard_grad_op", 1, "full_shard"),
        (2, "shard_optim", 3, "full_shard"),
        (1, "full_shard", 2, "shard_optim"),
        (2, "no_shard", 4, "hybrid_shard"),
        (4, "hybrid_shard_zero2", 4, "hybrid_shard"),
        (4, "hybrid_shard", 4, "hybrid_shard_zero2"),
    ),
]


def settings_of(strategy: str) -> dict[str, Any]:
    return {"strategy": strategy, **({"shard_size": 2} if "hybrid" in strategy else {})}


@pytest.mark.parametrize(("first", "one", "second", "other"), STRATEGIES)
def test_another_strategy_loads_it(first, one, second, other, tmp_path):
    run(first, saved_by, str(tmp_path / "c"), settings_of(one))
    for file in ("c", "c.pt"):
        run(second, loads, str(tmp_path / file), settings_of(other))


@pytest.mark.exhaustive
@pytest.mark.parametrize("units", [{"unit_bytes": 1 << 20}, *exhaustive({"unit_bytes": 1})])
def test_another_plan_of_units_loads_it(units, tmp_path):
    run(2, saved_by, str(tmp_path / "c"), {"unit_bytes": 400})
    run(2, loads, str(tmp_path / "c"), units)


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard", "shard_grad_op", "shard_optim")])
@ranks(2, exhaustive=(1, 3))
def test_a_resumed_training_is_one_that_was_not_stopped(rank, strategy, tmp_path):
    model, engine, optimizer = build(strategy=strategy)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, rank, range(3))
    schedule.step()
    save(engine, tmp_path / "c", optimizer, extra={"schedule": schedule.state_dict()})
    losses = train(model, optimizer, rank, range(3, 8))

    again, other, resumed = build(seed=5, strategy=strategy)
    schedule = torch.optim.lr_scheduler.ExponentialLR(resumed, 0.9)
    schedule.load_state_dict(load(other, tmp_path / "c", resumed)["schedule"])
    assert train(again, resumed, rank, range(3, 8)) == losses
    same(whole(other, resumed), whole(engine, optimizer))


@ranks(4)
def test_copies_write_each_slice_once(rank, world_size, tmp_path):
    model = MLP(width=200)
    engine = torch_shard.shard(model, strategy="hybrid_shard", shard_size=2)
    engine.save(tmp_path / "c")
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    sizes = [(tmp_path / "c" / f"__{r}_0.distcp").stat().st_size for r in range(world_size)]
    assert total < sum(sizes) < 1.1 * total
    assert max(sizes) < 0.4 * total  # the copies share the work
