"""The learning-rate finder finds what it finds under DDP; the batch-size finder is refused as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import assert_same_state, loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


class Tuned(net_class("lightning")):
    """Its losses differ between the ranks, so that those of a single device are no measure."""

    batch_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.05

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def found_by_tuner(world_size: int, strategy: Any, folder: Any) -> Any:
    module = Tuned()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    t = trainer("lightning", world_size, strategy, max_epochs=2, default_root_dir=folder)
    finder = Tuner(t).lr_find(module, loader(world_size), min_lr=1e-4, num_training=15, early_stop_threshold=None)
    assert_same_state(module.state_dict(), before)
    t.fit(module, loader(world_size))
    return module, finder.results, finder.suggestion(skip_begin=2, skip_end=1)


def found_by_callback(world_size: int, strategy: Any, folder: Any) -> Any:
    module, finder = Tuned(), LearningRateFinder(min_lr=1e-4, num_training_steps=15, early_stop_threshold=None)
    # Of its steps the callback leaves the first ten out: two epochs have too few.
    t = trainer("lightning", world_size, strategy, max_epochs=4, default_root_dir=folder, callbacks=[finder])
    t.fit(module, loader(world_size))
    return module, finder.optimal_lr.results, finder.optimal_lr.suggestion()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("find", "form"),
    [(found_by_tuner, "full"), *exhaustive((found_by_callback, "full"), (found_by_tuner, "sharded"))],
)
@ranks(2)
def test_the_learning_rate_that_is_found_is_that_of_ddp(world_size, find, form, tmp_path):
    expected, wanted, suggestion = find(world_size, "ddp", tmp_path)
    module, results, suggested = find(world_size, ShardStrategy(state_dict_type=form), tmp_path)
    assert results["lr"] == wanted["lr"] and len(wanted["loss"]) > 10
    assert results["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    assert suggested == suggestion is not None
    assert module.lr == expected.lr
    assert_same_state(module.state_dict(), expected.state_dict())
    assert list(tmp_path.rglob("*.ckpt")) == []


@ranks(2)
def test_the_batch_size_finder_is_refused_as_under_ddp(world_size):
    for strategy in ("ddp", "shard"):
        with pytest.raises(ValueError, match="not supported with distributed strategies"):
            Tuner(trainer("lightning", world_size, strategy)).scale_batch_size(Tuned(), loader(world_size))
        t = trainer("lightning", world_size, strategy, callbacks=[BatchSizeFinder()])
        with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
            t.fit(Tuned(), loader(world_size))
