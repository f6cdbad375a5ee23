"""Sharded checkpoints: a folder that all ranks write, which the engine reads, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import loader, net_class, trainer
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ConfigError


def sharded() -> Any:
    return ShardStrategy(state_dict_type="sharded", unshard_at_end=False)


@ranks(2)
def test_nothing_is_gathered_and_the_folder_holds_what_the_trainer_handed_over(rank, world_size, tmp_path):
    class Looks(net_class("lightning")):
        def on_save_checkpoint(self, checkpoint):
            assert isinstance(checkpoint["state_dict"]["inner.weight"], ShardTensor)
            state = checkpoint["optimizer_states"][0]["state"]["inner.weight"]
            assert isinstance(state["exp_avg"], ShardTensor)
            checkpoint["mine"] = {"tensor": torch.arange(3), "number": 4}

    t = trainer("lightning", world_size, sharded())
    t.fit(Looks(optimizer="adamw"), loader(world_size))
    t.save_checkpoint(tmp_path / "a.ckpt")
    other = trainer("lightning", world_size, sharded(), max_epochs=0)
    other.fit(net_class("lightning")(optimizer="adamw"), loader(world_size))
    extra = other.strategy.engine.load(tmp_path / "a.ckpt", other.optimizers[0])
    assert extra["mine"]["number"] == 4 and extra["mine"]["tensor"].tolist() == [0, 1, 2]
    assert {"pytorch-lightning_version", "loops", "callbacks", "lr_schedulers", "epoch"} <= set(extra)
    wanted, found = t.strategy.engine.state_dict(), other.strategy.engine.state_dict()
    if rank == 0:
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


@ranks(2)
def test_weights_come_from_a_checkpoint_that_the_engine_saved(world_size, tmp_path):
    t = trainer("lightning", world_size, sharded())
    module = net_class("lightning")()
    t.fit(module, loader(world_size))
    t.strategy.engine.save(tmp_path / "engine", extra=[1, 2])
    found = trainer("lightning", world_size).validate(
        net_class("lightning")(), loader(world_size), ckpt_path=tmp_path / "engine", verbose=False
    )
    assert found == trainer("lightning", world_size).validate(module, loader(world_size), verbose=False)


def test_unknown_settings_are_refused():
    with pytest.raises(ConfigError, match="state_dict_type"):
        ShardStrategy(state_dict_type="shared")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="AsyncCheckpointIO"):
        ShardStrategy(async_save=True)


@ranks(2)
def test_a_sharded_checkpoint_needs_a_shared_file_system(world_size):
    t = trainer("lightning", world_size, sharded())
    t.fit(net_class("lightning")(), loader(world_size))
    with pytest.raises(ConfigError, match="file system"):
        t.save_checkpoint("memory://a.ckpt")
