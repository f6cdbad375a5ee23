"""What hooks see of a checkpoint that a run goes on from: as under DDP, all of it is there before set-up is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule

from tests.lightning.support import assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


class Data(LightningDataModule):
    """Trains on fewer batches once it has been saved."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size, self.batches = world_size, 6

    def train_dataloader(self) -> Any:
        return loader(self.world_size, self.batches)

    def state_dict(self) -> dict[str, Any]:
        return {"batches": 2}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def whole(module: Any) -> torch.Tensor:
    weight = module.head.weight
    return (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().clone()


def looking(seen: dict[str, Any]) -> Any:
    class Looking(net_class("lightning")):
        rate = 0.04

        def on_save_checkpoint(self, checkpoint):
            checkpoint["rate"] = 0.01

        def on_load_checkpoint(self, checkpoint):
            self.rate = checkpoint["rate"]

        def configure_optimizers(self):
            seen["configured"] = (self.rate, whole(self), self.trainer.estimated_stepping_batches)
            return torch.optim.SGD(self.parameters(), lr=self.rate)

        def on_fit_start(self):
            seen["fit"] = whole(self)

    return Looking()


class Counting(Callback):
    count = 0

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.seen["count"] = self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def resumed(t: Any, world_size: int, path: Any, seen: dict[str, Any]) -> Any:
    module = looking(seen)
    t.fit(module, datamodule=Data(world_size), ckpt_path=path)
    return module


@pytest.mark.parametrize("form", [*exhaustive("full"), "sharded"])
@ranks(2)
def test_hooks_before_and_in_set_up_see_the_checkpoint_as_on_a_single_device(rank, world_size, tmp_path, form):
    own = tmp_path / f"single{rank}.ckpt"
    t = single("lightning", callbacks=[Counting({})])
    t.fit(looking({}), datamodule=Data(1))
    t.save_checkpoint(own)
    expected: dict[str, Any] = {}
    alone = resumed(single("lightning", max_epochs=2, callbacks=[Counting(expected)]), 1, own, expected)

    from lightning_shard.for_lightning import ShardStrategy

    class Save(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(tmp_path / "shard.ckpt")

    found: dict[str, Any] = {}
    strategy = ShardStrategy(state_dict_type=form)
    t = trainer("lightning", world_size, strategy, callbacks=[Counting({}), Save()])
    t.fit(looking({}), datamodule=Data(world_size))
    strategy = ShardStrategy(state_dict_type=form)
    t = trainer("lightning", world_size, strategy, max_epochs=2, callbacks=[Counting(found)])
    together = resumed(t, world_size, tmp_path / "shard.ckpt", found)

    assert (found["count"], found["configured"][0], found["configured"][2]) == (7, 0.01, expected["configured"][2])
    torch.testing.assert_close(found["configured"][1], expected["configured"][1])
    torch.testing.assert_close(found["fit"], expected["fit"])
    assert_same_state(together.state_dict(), alone.state_dict())


@ranks(2)
def test_a_hook_adds_the_layers_that_a_file_has(rank, world_size, tmp_path):
    class Grown(net_class("lightning")):
        def on_load_checkpoint(self, checkpoint):
            self.more = torch.nn.Linear(3, 3)

    t = single("lightning")
    module = net_class("lightning")()
    module.more = torch.nn.Linear(3, 3)
    t.strategy.connect(module)
    t.save_checkpoint(tmp_path / f"{rank}.ckpt", weights_only=True)
    torch.distributed.barrier()
    found = Grown()
    trainer("lightning", world_size).validate(found, loader(world_size), ckpt_path=tmp_path / "0.ckpt", verbose=False)
    torch.testing.assert_close(found.more.weight, module.more.weight)
