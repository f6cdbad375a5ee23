"""Checkpoints of every kind, made by real ranks, and what they must hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torch_shard
from tests.checkpoint import helpers
from tests.checkpoint.test_interop import by_name, plain, train, trained
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
    sharded, second = plain()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    second = torch.optim.AdamW(
        [{"params": [p for p in sharded.parameters() if p.ndim >= 2], "weight_decay": 0.1}, _small(sharded)], lr=0.01
    )
    train(sharded, second, rank)
    values, state = get_state_dict(sharded, second)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder / "fsdp2")
    expected = by_name(sharded, second)
    if rank == 0:
        torch.save(expected, folder / "fsdp2.expected")
    model, optimizer = plain()
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, rank)
    dcp.save({"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder / "ddp")
    values, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**values, "optimizer": state, "train_state": {"step": 2}}, checkpoint_id=folder / "titan")
    values, state = get_state_dict(model, optimizer)
    dcp.save({"app": {"model": values, "optim": state}}, checkpoint_id=folder / "app")
    if rank == 0:
        plainly = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(plainly, folder / "ddp.expected")
        torch.save({**plainly, "epoch": 7}, folder / "plain.pt")
        torch.save(model.state_dict(), folder / "state.pt")
    dist.barrier()


def _small(model: nn.Module) -> dict[str, Any]:
    return {"params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.02}


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
