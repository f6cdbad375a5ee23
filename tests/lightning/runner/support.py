"""Programs that know nothing of this package, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.run_python import run_python

RUNNER = ("-m", "lightning_shard")

# Trains with each strategy that its command line has, one after the other, in the same processes. A strategy is a name or an
# expression. What is trained depends on the answers that programs ask for.
TRAINER = """
import json, logging, os, sys, warnings
import torch
import {namespace} as pl
from {namespace}.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from {namespace}.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard

logging.disable(logging.INFO)
warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    def __init__(self, parallel=False):
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
        self.parallel = parallel

    def configure_model(self):
        if self.parallel:
            for layer in (self.net[0], self.net[2]):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.parallel = False

    def loss(self, batch):
        x = batch[:, :4]
        if isinstance(self.trainer.strategy, DDPStrategy):  # as contrastive learning does: each rank has a batch of its own
            x = x - self.all_gather(x).mean((0, 1))
        return (self.net(x) - batch[:, 4:]).square().mean()

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train", loss, sync_dist=isinstance(self.trainer.strategy, DDPStrategy))
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def train(strategy, folder):
    data = torch.randn(24, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    load = lambda: torch.utils.data.DataLoader(data, batch_size=4)
    keep = ModelCheckpoint(dirpath=folder, monitor="val", save_last=True)
    t = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, callbacks=[keep], logger=False,
                   default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0)
    net = Net(isinstance(strategy, ModelParallelStrategy))
    t.fit(net, load(), load())
    kinds = (DDPStrategy, FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)
    found = {
        "class": type(t.strategy).__module__,
        "is": [isinstance(t.strategy, kind) for kind in kinds],
        "ranks": t.world_size,
        "metrics": {name: float(value) for name, value in t.callback_metrics.items()},
        "state": {name: value.tolist() for name, value in net.state_dict().items()},
        "test": t.validate(net, load(), verbose=False, ckpt_path="last")[0]["val"],
    }
    if t.is_global_zero:
        print("RESULT", json.dumps(found), flush=True)


if __name__ == "__main__":
    for number, given in enumerate(sys.argv[2:]):
        train(eval(given) if "(" in given else given, os.path.join(sys.argv[1], str(number)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def script(folder: Path, text: str, name: str = "train.py", **names: str) -> Path:
    """Write a program, with the package of Lightning's that it imports."""
    path = folder / name
    for key, value in names.items():
        text = text.replace("{" + key + "}", value)
    path.write_text(text, encoding="utf-8")
    return path


def results(printed: str) -> list[Any]:
    """Return what rank 0 has printed, in order."""
    return [json.loads(line.removeprefix("RESULT ")) for line in printed.splitlines() if line.startswith("RESULT ")]


def run(*words: object, folder: Path, timeout: float = 300.0, **variables: str) -> list[Any]:
    """Run a command behind ``python`` and return what rank 0 has printed."""
    return results(run_python(*words, folder=folder, timeout=timeout, **variables).stdout)
