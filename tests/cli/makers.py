"""Checkpoints of every kind, made by real ranks, and what they must hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import torch_shard
from tests.checkpoint import helpers
from tests.checkpoint.test_interop import by_name, saved_as, trained
from torch_shard.checkpoint import save

RANKS = 2
BLOCKS, WIDTH = 16, 512


class Wide(nn.Module):
    """Large enough that holding all of it shows: 32 MiB, 2 MiB a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(BLOCKS))


def make_all(rank: int, world_size: int, folder: Path, lightning: dict[str, Any]) -> None:
    helpers.saved_by(rank, world_size, str(folder / "ours"), {})
    _foreign(rank, folder)
    _several(rank, folder)
    _lightning(folder, copy.deepcopy(lightning))
    torch.manual_seed(0)
    wide = Wide()
    engine = torch_shard.shard(wide)
    save(engine, folder / "wide")
    engine.close()


def _foreign(rank: int, folder: Path) -> None:
    """As FSDP2, DDP, torchtitan and torch's own recipe save, and what all of them hold."""
    expected = by_name(*saved_as("fsdp2", rank, folder / "fsdp2"))
    for form in ("titan", "app", "ddp"):
        model, optimizer = saved_as(form, rank, folder / form)
    if rank == 0:
        torch.save(expected, folder / "fsdp2.expected")
        plainly = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(plainly, folder / "ddp.expected")
        torch.save({**plainly, "epoch": 7}, folder / "plain.pt")
        torch.save(model.state_dict(), folder / "state.pt")
    dist.barrier()


def _several(rank: int, folder: Path) -> None:
    """Two models and two optimizers with names."""
    first_model, engine, first = trained(rank)
    second, other, _ = trained(rank)
    sgd = torch.optim.SGD(second.parameters(), lr=0.1)
    save(engine, folder / "several", {"one": first, "two": sgd}, models={"teacher": other}, extra=[1, torch.ones(2)])
    engine.close()
    other.close()
    del first_model  # the engine does not hold it


def _lightning(folder: Path, checkpoint: dict[str, Any]) -> None:
    """A Trainer's checkpoint in the layouts of Lightning's ModelParallelStrategy and of this package."""
    from lightning.fabric.strategies.fsdp import _distributed_checkpoint_save

    model = lightning_net()
    optimizer = model.configure_optimizers()[0][0]
    model.load_state_dict(checkpoint.pop("state_dict"))
    optimizer.load_state_dict(checkpoint.pop("optimizer_states")[0])
    values, state = get_state_dict(model, optimizer)
    _distributed_checkpoint_save({"state_dict": values, "optimizer_0": state}, folder / "lightning")
    _distributed_checkpoint_save({"model": values, "optimizer_0": state}, folder / "lightning_fsdp1")
    if dist.get_rank() == 0:
        for name in ("lightning", "lightning_fsdp1"):
            torch.save(checkpoint, folder / name / "meta.pt")
    engine = torch_shard.shard(model, unit_bytes=256)
    save(engine, folder / "ours_lightning", optimizer, extra=checkpoint)
    engine.close()


def lightning_net() -> Any:
    """Of the tests of the Lightning front end."""
    from tests.lightning.support import net_class

    return net_class("lightning")("adam")


def fit(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """Train with strategy="shard", save a folder, and return the module's state."""
    from lightning_shard.for_lightning import ShardStrategy
    from tests.lightning.support import loader, trainer

    made = trainer("lightning", world_size, ShardStrategy(state_dict_type="sharded"), enable_checkpointing=False)
    module = lightning_net()
    module.on_train_end = lambda: made.save_checkpoint(path)
    made.fit(module, loader(world_size))
    return {name: value.clone() for name, value in module.state_dict().items()}
