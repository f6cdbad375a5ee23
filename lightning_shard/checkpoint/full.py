"""Full checkpoints: one file, in the form that a single-device Trainer reads and writes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, ShardTensor
from torch_shard.errors import CheckpointError, StateDictError
from torch_shard.frontend import load_optim_state_dict, numbered_optim_state_dict, param_names_of
from torch_shard.frontend.checkpoint import by_name, refuse_damaged
from torch_shard.log import logger

from .files import is_local
from .safe_load import load_safely

# -- the model --------------------------------------------------------------------------------------------------------


def model_state(engine: Engine) -> dict[str, Any]:
    """Return the full state dict: on rank 0's CPU, and on other ranks the same entries on the meta device. Collective.

    All ranks have the entries, because a hook ``on_save_checkpoint``, which may drop or rename some, runs on all ranks.
    """
    full = engine.state_dict(rank0_only=True, offload_to_cpu=True)
    if engine.rank == 0:
        return full
    return {name: on_meta(value) for name, value in engine.state_dict(form="sharded", offload_to_cpu=False).items()}


def load_model(engine: Engine, state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load a full or sharded state dict, which may view a mapped file, and return the keys that don't match. Collective."""
    state: Any = copy.copy(state_dict)  # keeps the class, which may have _metadata
    live = engine.state_dict(form="sharded", offload_to_cpu=False)
    for key, value in state.items():
        # Modules may keep what they are given, extra state above all.
        if not isinstance(value, ShardTensor) and not isinstance(live.get(key), ShardTensor):
            state[key] = value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
    return engine.load_state_dict(state, strict=strict)


def on_meta(value: Any) -> Any:
    """Return a meta tensor like `value`; anything but a tensor is returned as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(engine: Engine, optimizer: Any, parameters: nn.Module) -> dict[str, Any]:
    """Return full optimizer state by number, as ``optimizer.state_dict()`` of a single device is. Collective.

    Ranks other than 0 get the groups without any state.

    Args:
        engine: one of those that shard the optimizer's parameters.
        optimizer: the optimizer.
        parameters: a module that names the optimizer's parameters.
    """
    if not is_sharded(optimizer):
        return optimizer.state_dict()
    found = numbered_optim_state_dict(engine, optimizer, True, parameters)
    numbers = itertools.count()
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [next(numbers) for _ in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": found.get("state", {}), "param_groups": groups}


def load_optimizer(engine: Engine, optimizer: Any, state: Mapping[str, Any], parameters: nn.Module) -> None:
    """Load full state by number, the same on all ranks, into an optimizer. Collective.

    `parameters` is as for :func:`optimizer_state`.
    """
    if not is_sharded(optimizer):
        optimizer.load_state_dict(copy.deepcopy(state))  # which keeps what it is given: views of the file
        return
    named = by_name(optimizer, names_of(engine, optimizer, parameters), state)
    load_optim_state_dict(engine, optimizer, named, parameters)


def is_sharded(optimizer: Any) -> bool:
    return any(isinstance(p, ShardTensor) for group in optimizer.param_groups for p in group["params"])


def names_of(engine: Engine, optimizer: Any, parameters: nn.Module) -> dict[int, str]:
    """Return the names of an optimizer's parameters in the module `parameters`, by id. Not collective."""
    try:
        return param_names_of(engine, optimizer, parameters)
    except StateDictError:
        raise StateDictError(
            f"rank {engine.rank}: {type(optimizer).__name__} mixes parameters of the LightningModule with others, so "
            "its state can't be saved by name; register the others in the module."
        ) from None


# The entries that are loaded into shards. The last one is of WeightAveraging, which puts the average into "state_dict".
_MAPPED = ("state_dict", "optimizer_states", "current_model_state")

# -- the file ---------------------------------------------------------------------------------------------------------


def read_file(
    path: Any, checkpoint_io: Any, maps: bool, weights_only: bool | None, share: tuple[int, int]
) -> dict[str, Any]:
    """Read a checkpoint file. Not collective.

    The tensors of model and optimizers view the mapped file, so that a rank reads the bytes of its shards only, and of its share
    in verifying the file. Each rank reads all of a file at a URL, in torch's format of before 1.6, or of a user's own plugin.

    Args:
        path: the file.
        checkpoint_io: the plugin that reads what can't be mapped.
        maps: True if the plugin reads with torch.load alone and replaces files as a whole, so that mapping gives the same.
        weights_only: see :func:`.safe_load.load_safely`.
        share: this rank, and the number of ranks that read the file.

    Raises:
        CheckpointError: the file is damaged in what this rank verifies, is of an unknown form, or holds objects that the safe
            loader refuses.
    """
    found, mapped = read_plain(path, checkpoint_io, maps, weights_only, share)
    if mapped and isinstance(found, dict):
        # These are copied, or read shard by shard. Hooks and callbacks may keep the rest for as long as they like.
        rest = {key: value for key, value in found.items() if key not in _MAPPED}
        found.update(copy.deepcopy(rest))
    if not mapped:
        logger.info("%s can't be mapped into memory, so each rank has read all of it", path)
    if not isinstance(found, dict) or "pytorch-lightning_version" not in found:
        raise CheckpointError(
            f"{path} is not a checkpoint of Lightning's Trainer: it has no 'pytorch-lightning_version'. Load plain weights "
            "with model.load_state_dict(torch.load(...)) before fit()."
        )
    return found


def read_plain(
    path: Any, checkpoint_io: Any, maps: bool, weights_only: bool | None, share: tuple[int, int]
) -> tuple[Any, bool]:
    """Return what a file holds, and whether its tensors view the mapped file; see :func:`read_file`. Not collective."""
    mapped = maps and is_local(path) and _is_zip(path)
    if mapped:
        refuse_damaged(Path(path), *share)

    def load(safe: bool) -> Any:
        if mapped:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=safe)
        return checkpoint_io.load_checkpoint(path, weights_only=safe)

    return load_safely(load, path, weights_only), mapped


def _is_zip(path: Any) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"
