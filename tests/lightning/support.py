"""Small models and Trainers, for both namespaces of Lightning."""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import LightningEnvironment
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


Net = net_class("lightning")


@functools.cache
def recording_class(namespace: str = "lightning") -> Any:
    class Recording(net_class(namespace)):
        """Keeps the loss of each step, of this rank's samples."""

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            self.seen.append(loss.item())
            return loss

    return Recording


class TwoOptimizers(Net):
    """They step in every batch, and share the root's unit."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.seen.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        some = [*self.blocks.parameters(), self.scale]
        mine = {id(p) for p in some}
        rest = [p for p in self.parameters() if id(p) not in mine]
        return torch.optim.SGD(some, lr=0.05, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)


def late_class(namespace: str, make: Callable[[], nn.Module], device: str = "meta") -> Any:
    """A Net that gets one more module, ``extra``, in ``configure_model``, only once."""

    class Late(net_class(namespace)):
        def __init__(self) -> None:
            super().__init__()
            self.extra = None

        def configure_model(self) -> None:
            if self.extra is None:
                with torch.device(device):
                    torch.manual_seed(2)
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


class Claims(LightningEnvironment):
    """The environment of a cluster that says what it is told to."""

    creates_processes_externally = True

    def __init__(self, world: int, rank: int, local: int, node: int = 0) -> None:
        super().__init__()
        said = {"world_size": world, "global_rank": rank, "local_rank": local, "node_rank": node}
        for name, value in said.items():
            setattr(self, name, lambda value=value: value)

    def teardown(self) -> None:
        """Leave WORLD_SIZE in the environment, which Lightning's own removes and later tests in these processes need."""


def fitted(module: Any, strategy: Any = "shard", ckpt_path: Any = None, val_batches: int = 0, **options: Any) -> Any:
    """A Trainer over all ranks that has fitted the module."""
    world_size = dist.get_world_size()
    t = trainer("lightning", world_size, strategy, **options)
    t.fit(module, loader(world_size), loader(world_size, val_batches) if val_batches else None, ckpt_path=ckpt_path)
    return t


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


def assert_alike(found: Any, wanted: Any, where: str = "") -> None:
    """Same keys in the same order, same types, close numbers; of floats, equal but for rounding in double precision."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), where
        for key in wanted:
            assert_alike(found[key], wanted[key], f"{where}[{key!r}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_alike(a, b, f"{where}[{i}]")
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, float):
        assert math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-12), f"{where}: {found} is not {wanted}"
    else:
        assert found == wanted, f"{where}: {found!r} is not {wanted!r}"
