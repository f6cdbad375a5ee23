"""A file of a Trainer or of Fabric of which a byte has changed is refused on all ranks."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric

from tests.checkpoint.test_damaged_full import flip
from tests.lightning.support import loader, net_class, trainer
from tests.support.ranks import ranks
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
