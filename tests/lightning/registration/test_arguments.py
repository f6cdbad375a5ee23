"""Arguments of the Trainer that say how many batches there are, how often something happens, and what is checked meanwhile."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.lightning.support import BATCH, assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


class Records(net_class("lightning")):
    """Notes which batches it gets, and what the metrics are."""

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        if index == getattr(self, "stop_at", None):
            return -1
        self.seen.append(("train", self.current_epoch, index))
        return None

    def on_validation_batch_start(self, batch: Any, index: int) -> None:
        self.seen.append(("val", self.current_epoch, index))

    def on_validation_epoch_end(self) -> None:
        self.seen.append(round(float(self.trainer.callback_metrics.get("val", -1)), 4))

    def on_train_epoch_end(self) -> None:
        self.seen.append(round(float(self.trainer.callback_metrics.get("train", -1)), 4))


def assert_same_notes(found: list[Any], wanted: list[Any]) -> None:
    assert [n for n in found if isinstance(n, tuple)] == [n for n in wanted if isinstance(n, tuple)]
    numbers = [n for n in wanted if not isinstance(n, tuple)]
    assert [n for n in found if not isinstance(n, tuple)] == pytest.approx(numbers, abs=2e-4)


def assert_alike(world_size: int, make: Any = Records, data: Any = None, **options: Any) -> Any:
    """A fit, sharded and on a single device, that sees the same batches and ends in the same weights."""
    expected, module = make(), make()
    data = data or (lambda n: {"train_dataloaders": loader(n), "val_dataloaders": loader(n, 3)})
    single("lightning", **options).fit(expected, **data(1))
    t = trainer("lightning", world_size, **options)
    t.fit(module, **data(world_size))
    assert_same_notes(module.seen, expected.seen)
    assert_same_state(module.state_dict(), expected.state_dict())
    return module


HOW_MANY: list[dict[str, Any]] = [
    {"overfit_batches": 2, "max_epochs": 2},
    {"fast_dev_run": 2},
    {"limit_train_batches": 0.5, "limit_val_batches": 1, "val_check_interval": 2},
    {"val_check_interval": 4, "check_val_every_n_epoch": None, "max_epochs": 2},
    {"num_sanity_val_steps": 2, "max_steps": 4, "max_epochs": -1},
    {"max_time": {"seconds": 0}},
    {"max_epochs": 3, "min_steps": 2, "max_time": "00:01:00:00"},
]
WHAT_ELSE: list[dict[str, Any]] = [
    {"barebones": True},
    {"inference_mode": False},
    {"detect_anomaly": True},
    {"deterministic": True, "benchmark": True},
    {"profiler": "simple"},
]


@pytest.mark.exhaustive
@ranks(2)
def test_as_many_batches_are_trained_and_validated_as_on_a_single_device(world_size):
    for options in HOW_MANY:
        assert_alike(world_size, **options)


@pytest.mark.exhaustive
@ranks(2)
def test_what_watches_a_run_changes_nothing(world_size):
    before = torch.backends.cudnn.benchmark
    for options in WHAT_ELSE:
        assert_alike(world_size, **options)
    torch.backends.cudnn.benchmark = before


@ranks(2)
def test_a_batch_start_that_returns_minus_one_ends_the_epoch(world_size):
    class Stops(Records):
        stop_at = 3

    module = assert_alike(world_size, Stops, max_epochs=2)
    assert ("train", 1, 2) in module.seen and ("train", 1, 3) not in module.seen


@pytest.mark.parametrize("use", [True, *exhaustive(False)])
@ranks(2)
def test_samples_are_dealt_out_and_shuffled_as_with_ddp(world_size, use):
    def run(strategy):
        pl.seed_everything(11, verbose=False)
        module = Records()
        data = DataLoader(loader(1).dataset, batch_size=BATCH // world_size, shuffle=True)
        trainer("lightning", world_size, strategy, max_epochs=2, use_distributed_sampler=use).fit(module, data)
        return module

    expected, module = run("ddp"), run("shard")
    assert_same_notes(module.seen, expected.seen)
    assert len([entry for entry in module.seen if isinstance(entry, tuple)]) == (12 if use else 24)
    assert_same_state(module.state_dict(), expected.state_dict())
