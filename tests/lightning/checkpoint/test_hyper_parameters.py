"""A module among the hyperparameters, which is the one that is trained, is saved as under DDP, or left out with a warning."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import assert_same_state, loader, trainer
from tests.support.ranks import ranks


def net(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))


class Given(LightningModule):
    """Trains the module that it is given, as many templates do."""

    def __init__(self, net: nn.Module, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.net = net

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class SavesNothing(Given):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].clear()


def fit(strategy: Any, world_size: int, module: Any, epochs: int = 1, **options: Any) -> Any:
    t = trainer("lightning", world_size, strategy, max_epochs=epochs)
    t.fit(module, loader(world_size), **options)
    return t


def save(strategy: Any, world_size: int, path: Any, kind: Any = Given, warning: str = "") -> None:
    """Fit one epoch and save within the run, as ModelCheckpoint does; rank 0 warns."""

    class Saves(kind):
        def on_train_epoch_end(self) -> None:
            warns = bool(warning) and self.trainer.is_global_zero
            with pytest.warns(UserWarning, match=warning) if warns else contextlib.nullcontext():
                self.trainer.save_checkpoint(path)

    fit(strategy, world_size, Saves(net(), 0.01))


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "Linear"}], ids=["plain", "checkpointed"])
@ranks(2)
def test_one_file_has_the_module_whole_and_its_values_once(world_size, tmp_path, settings):
    path = tmp_path / "one.ckpt"
    save(ShardStrategy(**settings), world_size, path)
    saved = torch.load(path, weights_only=False)
    found, values = saved["hyper_parameters"]["net"], saved["state_dict"]
    assert saved["hyper_parameters"]["lr"] == 0.01
    assert_same_state({f"net.{name}": value for name, value in found.state_dict().items()}, values)
    assert all(type(p) is nn.Parameter and p.requires_grad for p in found.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in found.modules())
    assert found[0].weight.data_ptr() == values["net.0.weight"].data_ptr()
    # As Lightning has it for a checkpoint that holds a class: it must be trusted.
    for given in ({}, {"net": net(6)}):
        again = Given.load_from_checkpoint(path, weights_only=False, **given)
        assert_same_state(again.state_dict(), values)
    resumed, expected = Given(net(6), 0.01), Given(net(), 0.01)
    fit("shard", world_size, resumed, 2, ckpt_path=path, weights_only=False)
    fit("ddp", world_size, expected, 2)
    assert_same_state(resumed.state_dict(), expected.state_dict())


@ranks(2)
def test_a_folder_leaves_it_out_with_a_warning_and_is_loaded(world_size, tmp_path):
    path = tmp_path / "folder.ckpt"
    strategy = ShardStrategy(state_dict_type="sharded")
    save(strategy, world_size, path, warning=r"'net'.*save_hyperparameters\(ignore=\['net'\]\)")
    resumed, expected = Given(net(6), 0.01), Given(net(), 0.01)
    fit("shard", world_size, resumed, 2, ckpt_path=path)
    fit("ddp", world_size, expected, 2)
    assert_same_state(resumed.state_dict(), expected.state_dict())
    assert resumed.hparams.net is resumed.net  # the module's own hyperparameters are as they were


@ranks(2)
def test_a_module_whose_values_a_hook_has_dropped_is_left_out_with_a_warning(world_size, tmp_path):
    path = tmp_path / "one.ckpt"
    save("shard", world_size, path, SavesNothing, warning=r"'net'.*load_from_checkpoint")
    assert torch.load(path, weights_only=True)["hyper_parameters"] == {"lr": 0.01}
