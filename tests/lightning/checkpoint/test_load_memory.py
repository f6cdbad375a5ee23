"""Loading takes the memory of the shards, and little more: no rank ever holds the file."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import NAMESPACES, loader, trainer
from tests.support.ranks import ranks

WIDTH, BLOCKS = 724, 8
UNIT = WIDTH * (WIDTH + 1) * 4
MODEL = BLOCKS * UNIT
MIB = 1 << 20


def big_class() -> Any:
    class Big(NAMESPACES["lightning"].LightningModule):  # type: ignore[name-defined, misc]
        """Blocks of 2 MiB each, trained with AdamW."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x = nn.functional.pad(batch[0], (0, WIDTH - batch[0].shape[1]))
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    return Big


def anonymous() -> int:
    """Bytes of memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


class Peak:
    """The highest amount of anonymous memory between `start` and `stop`, above what there was."""

    def start(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else memory that was freed before would be taken, and not be seen
        self.stopped, self.before = threading.Event(), anonymous()
        self.highest = self.before
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()

    def _sample(self) -> None:
        while not self.stopped.is_set():
            self.highest = max(self.highest, anonymous())
            time.sleep(0.0005)

    def stop(self) -> int:
        self.stopped.set()
        self.thread.join()
        return max(self.highest, anonymous()) - self.before


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "copies"), [("full", 0), ("sharded", 1)])
@ranks(2, fresh=True)
def test_the_file_is_never_in_memory(world_size, form, copies, tmp_path):
    path = tmp_path / "big.ckpt"
    t = trainer(
        "lightning", world_size, ShardStrategy(state_dict_type=form, unshard_at_end=False), limit_train_batches=1
    )
    t.fit(big_class()(), loader(world_size))
    t.save_checkpoint(path)
    del t
    peak = Peak()

    class Measured(big_class()):
        def on_fit_start(self):
            peak.start()

        def on_train_start(self):
            self.peak = peak.stop()

    module = Measured()
    t = trainer("lightning", world_size, ShardStrategy(unshard_at_end=False), limit_train_batches=1, max_epochs=2)
    t.fit(module, loader(world_size), ckpt_path=path)
    # The optimizer's state comes into being here. Of sharded ones everything is read before anything is changed, for hooks
    # to edit, and the optimizer takes copies.
    state = 2 * MODEL // world_size
    allowed = state + copies * (MODEL + 2 * MODEL) // world_size + 2 * UNIT
    assert state - UNIT < module.peak <= allowed, f"{module.peak / MIB:.1f} MiB, allowed {allowed / MIB:.1f}"
    assert form == "sharded" or allowed < state + MODEL, "this would not notice a model that is read whole"
