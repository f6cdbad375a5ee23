"""A file or folder of a Trainer or of Fabric of which a byte has changed is refused on all ranks."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from lightning.fabric import Fabric

from tests.checkpoint.test_bad_files import values_of
from tests.checkpoint.test_damaged_full import flip
from tests.lightning.support import Net, loader, net_class, shard_strategy, trainer
from tests.support import damage
from tests.support.leaving import left_with
from tests.support.ranks import ranks, run
from torch_shard.errors import CheckpointError

DAMAGED = r"damaged .*archive/data/0"


@ranks(2)
def test_a_flipped_bit_in_a_checkpoint_is_refused_by_the_trainer(rank, world_size, tmp_path):
    path = tmp_path / "last.ckpt"
    first = trainer("lightning", world_size)
    first.fit(net_class("lightning")(), loader(world_size))
    first.save_checkpoint(path)
    if rank == 0:
        flip(path, "archive/data/0")
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=DAMAGED):
        trainer("lightning", world_size, max_epochs=2).fit(net_class("lightning")(), loader(world_size), ckpt_path=path)


@ranks(2)
def test_a_flipped_bit_in_a_file_is_refused_by_fabric(rank, world_size, tmp_path):
    path = tmp_path / "state.pt"
    if rank == 0:
        torch.save({"w": torch.ones(3)}, path)
        flip(path, "state/data/0")
    fabric = Fabric(accelerator="cpu", strategy="shard", devices=world_size)
    fabric.launch()
    fabric.barrier()
    with pytest.raises(CheckpointError, match=r"damaged .*data/0"):
        fabric.load(path, {"w": torch.zeros(3)})


def saves(rank, world_size, folder):
    t = trainer("lightning", world_size, shard_strategy(state_dict_type="sharded", unshard_at_end=False))
    t.fit(Net(), loader(world_size))
    t.save_checkpoint(folder)


def resumes(rank, world_size, folder):
    strategy = shard_strategy(state_dict_type="sharded", timeout=timedelta(seconds=30))
    trainer("lightning", world_size, strategy, max_epochs=2).fit(Net(), loader(world_size), ckpt_path=folder)


@pytest.mark.parametrize("first", [0, 1])
def test_a_folder_is_refused_on_all_ranks_by_one_error_though_the_first_that_has_it_leaves(first, tmp_path):
    run(2, saves, tmp_path / "c")
    file, position = values_of(tmp_path / "c", "model.inner.weight")
    damage.flip(tmp_path / "c" / file, position)
    errors = left_with(resumes, tmp_path / "c", first=first, folder=tmp_path)
    assert [error.split(":")[0] for error in errors] == ["CheckpointError"] * 2, errors
    assert all("is damaged" in error for error in errors)
