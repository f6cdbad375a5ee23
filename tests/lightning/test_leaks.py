"""Training for longer takes no more memory, and a run that has ended keeps none."""

from __future__ import annotations

import gc
import itertools
import resource
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger

import lightning_shard
import torch_shard
from tests.lightning.helpers import loader, net_class, trainer
from tests.ranks import ranks, run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MIB = 1 << 20


def resident() -> int:
    """Bytes of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


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


class Look(Callback):
    """Looks at the end of each epoch, when validation has run and a checkpoint has been written."""

    def __init__(self) -> None:
        self.objects: list[Counter[str]] = []
        self.resident: list[int] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.objects.append(live())
        self.resident.append(resident())


def all_callbacks(folder: Path) -> list[Any]:
    return [
        lightning_shard.ShardMonitor(grad_norms=True),
        LearningRateMonitor(),
        DeviceStatsMonitor(cpu_stats=False),
        EarlyStopping("val_loss", patience=100),
        ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True),
        ModelSummary(),
        Timer(),
        TQDMProgressBar(refresh_rate=1),
        Look(),
    ]


def assert_level(look: Look) -> None:
    """One tensor more is there now and then, with "ddp", too; a leak is one for each step, of which there are several."""
    grown = look.objects[2] - look.objects[1]  # fewer, where tests before this one had left something
    assert set(grown) <= {"tensors"} and grown["tensors"] < 2, grown


def options(folder: Path, rank: int) -> dict[str, Any]:
    return {
        "max_epochs": 3,
        "callbacks": all_callbacks(folder / "checkpoints"),
        "logger": CSVLogger(folder / f"logs{rank}"),
        "log_every_n_steps": 1,
        "enable_progress_bar": True,
        "enable_model_summary": True,
        "enable_checkpointing": True,
    }


def validated() -> Any:
    class Validated(net_class("lightning")):
        def validation_step(self, batch, index):
            self.log("val_loss", self.loss(batch), sync_dist=True)

    return Validated


@pytest.mark.exhaustive
@ranks(2)
def test_epochs_leave_no_tensors_and_no_objects_of_the_engine_behind(rank, world_size, tmp_path):
    net = validated()
    settings = options(tmp_path, rank)
    trainer("lightning", world_size, **settings).fit(net(optimizer="adamw"), loader(2), loader(2))
    look = settings["callbacks"][-1]
    assert look.objects[0]["Engine"] == 1
    # The first epochs leave something for good: scores of the two best checkpoints, for example.
    assert_level(look)


@ranks(2)
def test_a_run_that_has_ended_keeps_no_engine(rank, world_size, tmp_path):
    seen: list[Any] = []

    class Note(Callback):
        def on_train_start(self, trainer, module):
            seen.append(weakref.ref(trainer.strategy.engine))

    t = trainer("lightning", world_size, callbacks=[lightning_shard.ShardMonitor(grad_norms=True), Note()])
    t.fit(validated()(), loader(2))
    gc.collect()
    assert seen[0]() is None
    assert torch_shard.Engine.__qualname__ not in live()


def epochs_of_the_demo(rank: int, world_size: int, folder: Path, strategy: str) -> list[float]:
    """How much memory each epoch but the first has taken and kept, in MiB."""
    sys.path.insert(0, str(EXAMPLES))
    from lightning_gpt import LitGPT, TrainBatches

    steps = 15

    class Demo(LitGPT):
        """Epochs of a few steps."""

        def train_dataloader(self) -> Any:
            size, context = 16 // self.trainer.world_size, self.model.config.context
            whole = TrainBatches(self.text, 3 * steps, self.global_rank, size, context)

            class Epoch:
                def __len__(self) -> int:
                    return steps

                def __iter__(self) -> Any:
                    batches = iter(whole)
                    return (next(batches) for _ in range(steps))

            return Epoch()

    settings = options(folder / strategy, rank) | {"limit_val_batches": 2, "gradient_clip_val": 1.0}
    if strategy == "ddp":
        settings["callbacks"] = settings["callbacks"][1:]  # the monitor is for the engine
    trainer("lightning", world_size, strategy, **settings).fit(Demo("tiny", 3 * steps))
    look = settings["callbacks"][-1]
    assert len(look.resident) == 3
    assert_level(look)
    return [(later - before) / MIB for before, later in itertools.pairwise(look.resident)]


@pytest.mark.exhaustive
def test_three_epochs_of_the_demo_keep_no_more_memory_than_with_ddp(tmp_path):
    """Lightning and torch take some for the first time in later epochs."""
    ddp, ours = (run(2, epochs_of_the_demo, tmp_path, name, fresh=True, timeout=300.0) for name in ("ddp", "shard"))
    # One gradient of the model, 7 MiB, kept at each step would be 100 MiB an epoch.
    assert max(map(sum, ours)) < max(map(sum, ddp)) + 7, (ours, ddp)
