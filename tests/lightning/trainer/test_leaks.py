"""Training for longer takes no more memory, and a run that has ended keeps none."""

from __future__ import annotations

import ctypes
import gc
import re
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
from tests.lightning.support import loader, net_class, trainer
from tests.support.ranks import ranks, run

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MIB = 1 << 20
MALLINFO = hasattr(ctypes.CDLL(None), "mallinfo2")


class Mallinfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``: sizes in bytes, over all arenas."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def memory() -> dict[str, float]:
    """What this process holds: its resident size in MiB, without what is mapped from files; of that, what malloc has handed out;
    and how many blocks Python has, which keeps small objects in arenas of its own."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    # What is freed stays in malloc's arenas. In these runs that is 70 to 130 MiB, and it comes and goes by chance.
    libc.malloc_trim(0)
    info = libc.mallinfo2()
    (anonymous,) = re.findall(r"^RssAnon:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.M)
    return {
        "resident": int(anonymous) / 1024,
        "malloc": (info.uordblks + info.hblkhd) / MIB,
        "blocks": sys.getallocatedblocks(),
    }


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
        self.memory: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.objects.append(live())  # collects garbage first
        if MALLINFO:
            self.memory.append(memory())


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


STEPS = 15


def epochs_of_the_demo(rank: int, world_size: int, folder: Path, epochs: int) -> list[dict[str, float]]:
    """What the process holds at the end of each epoch."""
    sys.path.insert(0, str(EXAMPLES))
    from lightning_gpt import LitGPT, TrainBatches

    class Demo(LitGPT):
        """Epochs of a few steps, of small batches."""

        def train_dataloader(self) -> Any:
            size, context = 4 // self.trainer.world_size, self.model.config.context
            whole = TrainBatches(self.text, epochs * STEPS, self.global_rank, size, context)

            class Epoch:
                def __len__(self) -> int:
                    return STEPS

                def __iter__(self) -> Any:
                    batches = iter(whole)
                    return (next(batches) for _ in range(STEPS))

            return Epoch()

    settings = options(folder, rank) | {"max_epochs": epochs, "limit_val_batches": 2, "gradient_clip_val": 1.0}
    trainer("lightning", world_size, "shard", **settings).fit(Demo("tiny", epochs * STEPS))
    look = settings["callbacks"][-1]
    assert len(look.memory) == epochs
    assert_level(look)
    return look.memory


@pytest.mark.skipif(not MALLINFO, reason="needs mallinfo2 of glibc 2.33")
@pytest.mark.exhaustive
def test_epochs_of_the_demo_with_all_callbacks_take_no_memory_after_the_first(tmp_path):
    # torch keeps the last 2000 collectives in mind, about 1 KiB each: without this, what these take grows for some epochs.
    recorder = {"TORCH_FR_BUFFER_SIZE": "0"}
    for epochs in run(2, epochs_of_the_demo, tmp_path, 5, environment=recorder, timeout=300.0):
        first, second, *_, last = epochs
        assert last["resident"] < first["resident"] + 1, epochs
        # Of a leak at each step 4 KiB would show, or a dozen objects. (The second epoch takes a little for good.)
        steps = (len(epochs) - 2) * STEPS
        assert last["malloc"] < second["malloc"] + steps * 4 / 1024, epochs
        assert last["blocks"] < second["blocks"] + steps * 12, epochs
