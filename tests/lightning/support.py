"""Small models and Trainers, for both namespaces of Lightning."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.registration.registry import strategy_class  # its import makes the names known without autoloading
from tests.support.marks import quick

NAMESPACES = {"lightning": lightning.pytorch, "pytorch_lightning": pytorch_lightning}
both_namespaces = pytest.mark.parametrize("namespace", list(NAMESPACES))
# For what differs between the two in the name of the package alone.
either_namespace = pytest.mark.parametrize("namespace", quick(NAMESPACES, ["lightning"]))
FORMS = ["sharded", "full"]  # of checkpoints
both_forms = pytest.mark.parametrize("form", FORMS)
either_form = pytest.mark.parametrize("form", quick(FORMS, ["sharded"]))
BATCHES = 6
BATCH = 8  # samples of a step, over all ranks


def quiet() -> None:
    """Silence what Lightning says about small data and missing loggers."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def loader(world_size: int, batches: int = BATCHES) -> Any:
    """This rank's batches; those of all ranks together are those of a single device, in the same order."""
    torch.manual_seed(3)
    x = torch.randn(BATCH * batches, 6)
    y = x.cumsum(-1)[:, ::2].contiguous()
    rank = dist.get_rank() if world_size > 1 else 0
    mine = TensorDataset(x[rank::world_size], y[rank::world_size])
    return DataLoader(mine, batch_size=BATCH // world_size, shuffle=False)


@functools.cache
def net_class(namespace: str) -> Any:
    pl = NAMESPACES[namespace]

    class Net(pl.LightningModule):
        """Blocks, a buffer, and a parameter of the root's own that steps use directly."""

        def __init__(self, optimizer: str = "sgd", width: int = 7) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(5)
            self.inner = nn.Linear(6, width)
            self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
            self.head = nn.Linear(width, 3)
            self.scale = nn.Parameter(torch.full((3,), 1.5))
            self.register_buffer("offset", torch.tensor(0.25))
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inner(x)
            for block in self.blocks:
                x = x + torch.tanh(block(x))
            return self.head(x) + self.offset

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return (self(x) * self.scale - y).square().mean()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch)
            self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("test", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: Any, index: int) -> torch.Tensor:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            if self.hparams.optimizer == "sgd":
                return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            decayed = [p for p in self.parameters() if p.ndim >= 2]
            others = [p for p in self.parameters() if p.ndim < 2]
            optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Net


@functools.cache
def recording_class(namespace: str = "lightning") -> Any:
    class Recording(net_class(namespace)):
        """Keeps the loss of each step, of this rank's samples."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.seen.append(loss.item())
            return loss

    return Recording


def late_class(namespace: str, make: Callable[[], nn.Module]) -> Any:
    """A Net that gets one more module, ``extra``, in ``configure_model``: on meta, and only once."""

    class Late(net_class(namespace)):
        def __init__(self) -> None:
            super().__init__()
            self.extra = None

        def configure_model(self) -> None:
            if self.extra is None:
                with torch.device("meta"):
                    self.extra = make()

    return Late


def shard_strategy(namespace: str = "lightning", **options: Any) -> Any:
    return strategy_class(namespace)(**options)


def trainer(namespace: str, world_size: int, strategy: Any = "shard", **options: Any) -> Any:
    """A quiet CPU Trainer; on one device with ``strategy="auto"``."""
    quiet()
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world_size,
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,  # the loaders here are this rank's already
    }
    return NAMESPACES[namespace].Trainer(**(settings | options))


def single(namespace: str, **options: Any) -> Any:
    """The plain Trainer to compare with."""
    return trainer(namespace, 1, "auto", **options)


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert type(found[name]) is torch.Tensor, name
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")


def compare(
    world_size: int,
    make: Any = None,
    strategy: Any = "shard",
    namespace: str = "lightning",
    val_batches: int = 0,
    **options: Any,
) -> Any:
    """Fit on one device and sharded: the parameters must be equal. Returns both modules, and the sharded one's Trainer."""
    make = make or net_class(namespace)
    expected, module = make(), make()
    t = trainer(namespace, world_size, strategy, **options)
    for ranks_used, run, each in ((1, single(namespace, **options), expected), (world_size, t, module)):
        run.fit(each, loader(ranks_used), loader(ranks_used, val_batches) if val_batches else None)
    assert_same_state(module.state_dict(), expected.state_dict())
    return module, expected, t


def copied_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}
