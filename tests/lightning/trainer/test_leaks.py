"""Training for longer takes no more memory, and a run that has ended keeps none."""

from __future__ import annotations

import gc
import itertools
import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger

import lightning_shard
import torch_shard
from tests.lightning.support import Net, fitted, loader, trainer
from tests.support.ranks import ranks

STEPS, EPOCHS = 15, 5


def live() -> Counter[str]:
    """How many tensors, modules, and objects of the engine there are."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, torch.Tensor):
            found["tensors"] += 1
        elif issubclass(kind, torch.nn.Module):
            found["modules"] += 1
        elif kind.__module__.startswith(("torch_shard", "lightning_shard")):
            found[kind.__qualname__] += 1
    return found


# torch keeps the last 2000 collectives in mind, about 1 KiB each: without this, what these take grows for some epochs.
@pytest.mark.exhaustive
@ranks(2, environment={"TORCH_FR_BUFFER_SIZE": "0"}, timeout=300)
def test_epochs_leave_no_objects_and_take_no_memory_after_the_first(rank, world_size, tmp_path):
    objects: list[Counter[str]] = []
    blocks: list[int] = []  # of Python's memory

    class Look(Callback):
        """Looks at the end of each epoch, when validation has run and a checkpoint has been written."""

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            objects.append(live())  # collects garbage first
            blocks.append(sys.getallocatedblocks())

    callbacks = [
        lightning_shard.ShardMonitor(grad_norms=True),
        LearningRateMonitor(),
        DeviceStatsMonitor(cpu_stats=False),
        EarlyStopping("val", patience=100),
        ModelCheckpoint(tmp_path / "checkpoints", monitor="val", save_top_k=2, save_last=True),
        Timer(),
        Look(),
    ]
    options = {"log_every_n_steps": 1, "enable_checkpointing": True, "enable_progress_bar": True, "max_epochs": EPOCHS}
    logger = CSVLogger(tmp_path / f"logs{rank}")
    t = trainer("lightning", world_size, callbacks=callbacks, logger=logger, **options)
    t.fit(Net(optimizer="adamw"), loader(world_size, STEPS), loader(world_size, 2))
    assert objects[0]["Engine"] == 1
    # One tensor more is there now and then, with "ddp", too; a leak is one for each step. The first epochs leave
    # something for good: scores of the two best checkpoints, for example. A partner that was late once was asked where it is. The
    # connection for that stays, with a thread on the partner's side.
    grown = objects[-1] - objects[1]
    assert set(grown) <= {"tensors", "_SocketThread"} and max(grown.values(), default=0) < 2, grown
    # Of a leak at each step a dozen of Python's blocks would show, in every epoch; a module that is imported late shows in one.
    assert min(after - before for before, after in itertools.pairwise(blocks[1:])) < 12 * STEPS, blocks


@ranks(2)
def test_a_run_that_has_ended_keeps_no_engine():
    seen: list[Any] = []

    class Note(Callback):
        def on_train_start(self, trainer, module):
            seen.append(weakref.ref(trainer.strategy.engine))

    fitted(Net(), callbacks=[lightning_shard.ShardMonitor(grad_norms=True), Note()])
    gc.collect()
    assert seen[0]() is None
    assert torch_shard.Engine.__qualname__ not in live()
