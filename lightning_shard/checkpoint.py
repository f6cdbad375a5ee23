"""Single-file checkpoints: in and out of the form that a single-device Trainer reads and writes."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import operator
import pathlib
import pickle
import shutil
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, ShardTensor
from torch_shard.errors import ShardError, StateDictError

__all__ = ["is_sharded", "load_optimizer", "load_safely", "make_way", "model_state", "optimizer_state"]

# -- the model --------------------------------------------------------------------------------------------------------


def model_state(engine: Engine, model: nn.Module) -> dict[str, Any]:
    """The whole state dict on the CPU of rank 0; elsewhere the same entries without memory. Collective.

    An ``on_save_checkpoint`` that drops or renames entries runs on all ranks, and so finds them on all ranks.
    """
    whole = engine.state_dict(rank0_only=True, offload_to_cpu=True)
    if engine.rank == 0:
        return whole
    return {name: _on_meta(value) for name, value in engine.state_dict(form="sharded", offload_to_cpu=False).items()}


def _on_meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(engine: Engine, optimizer: Any, *, rank0_only: bool = True) -> dict[str, Any]:
    """Whole optimizer state as ``optimizer.state_dict()`` of a single device gives it, by number. Collective.

    With `rank0_only` the other ranks get the groups without any state.
    """
    if not is_sharded(optimizer):
        return optimizer.state_dict()
    named = engine.optim_state_dict(optimizer, rank0_only=rank0_only)
    names = _names(engine, optimizer)
    numbers = _numbers(names)
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [numbers[name] for name in group_names]}
        for group, group_names in zip(optimizer.param_groups, names, strict=True)
    ]
    # Numbers in ascending order, as torch writes them: the order of names is that of the units.
    state = {name: entries for name, entries in named.get("state", {}).items() if name not in numbers}
    for name, number in sorted(numbers.items(), key=operator.itemgetter(1)):
        if name in named.get("state", {}):
            state[number] = named["state"][name]
    return {"state": state, "param_groups": groups}


def load_optimizer(engine: Engine, optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load what a Trainer saved for this optimizer, sharded or not. Collective; all ranks give the same state."""
    if not is_sharded(optimizer):
        optimizer.load_state_dict(state)
        return
    names = [name for group in _names(engine, optimizer) for name in group]
    saved_order = [number for group in state["param_groups"] for number in group["params"]]
    if len(saved_order) != len(names):
        raise StateDictError(
            f"rank {engine.rank}: the checkpoint's optimizer has {len(saved_order)} parameters, this "
            f"{type(optimizer).__name__} has {len(names)}; configure_optimizers must give the groups that were saved."
        )
    name_of = dict(zip(saved_order, names, strict=True))
    named = {
        "state": {name_of.get(number, number): entries for number, entries in state["state"].items()},
        "other_state": [key for key in state["state"] if key not in name_of],
        "param_groups": [
            {**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }
    engine.load_optim_state_dict(optimizer, named)


def is_sharded(optimizer: Any) -> bool:
    return any(isinstance(p, ShardTensor) for group in optimizer.param_groups for p in group["params"])


def _names(engine: Engine, optimizer: Any) -> list[list[str]]:
    known = {id(p): name for name, p in engine.model.named_parameters()}
    known.update({id(p): name for unit in engine.units for name, p in zip(unit.names, unit.params, strict=True)})
    try:
        return [[known[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise StateDictError(
            f"rank {engine.rank}: {type(optimizer).__name__} mixes parameters of the LightningModule with others, so "
            "its state can't be saved by name; register the others in the module."
        ) from None


def _numbers(names: list[list[str]]) -> dict[str, int]:
    flat = [name for group in names for name in group]
    return {name: number for number, name in enumerate(flat)}


# -- the file ---------------------------------------------------------------------------------------------------------


def make_way(path: Any) -> None:
    """Remove a sharded checkpoint (a folder) where a single file of that name is about to be written."""
    folder = pathlib.Path(str(path))
    if not folder.is_dir():
        return
    if not any((folder / marker).is_file() for marker in (".metadata", "meta.pt")):
        raise IsADirectoryError(f"{folder} is a folder, and not a checkpoint; the checkpoint needs another path.")
    shutil.rmtree(folder)


def load_safely(load: Callable[[bool | None], dict[str, Any]], path: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint; unless told otherwise with the loader that runs no code from the file.

    Args:
        load: reads the file with the ``weights_only`` it is given.
        path: for messages.
        weights_only: what the user asked for; None means the safe loader, which then also accepts the harmless
            classes that hyper-parameters are made of.

    Raises:
        ShardError: the file holds something else; the message says how to load it if it can be trusted.
    """
    if weights_only is not None:
        return load(weights_only)
    try:
        with torch.serialization.safe_globals(_harmless()):
            return load(True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        found = next((line.strip() for line in reason if "GLOBAL" in line or "Unsupported" in line), reason[0])
        raise ShardError(
            f"{path} holds objects that the safe loader does not accept ({found}). If you trust the file, load it with "
            "ShardStrategy(weights_only=False) or Trainer.fit(..., weights_only=False), or allow its classes with "
            "torch.serialization.add_safe_globals([...])."
        ) from error


def _harmless() -> list[Any]:
    """Classes that only hold data, as hyper-parameters use them."""
    found: list[Any] = [
        argparse.Namespace,
        types.SimpleNamespace,
        collections.defaultdict,
        collections.deque,
        dict,
        list,
        set,
        int,
        decimal.Decimal,
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
        datetime.timezone,
        pathlib.PurePath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    ]
    for module, name in (
        ("lightning.fabric.utilities.data", "AttributeDict"),
        ("lightning_fabric.utilities.data", "AttributeDict"),
        ("omegaconf.base", "ContainerMetadata"),
        ("omegaconf.base", "Metadata"),
        ("omegaconf.nodes", "AnyNode"),
        ("omegaconf.dictconfig", "DictConfig"),
        ("omegaconf.listconfig", "ListConfig"),
    ):
        if module in sys.modules and hasattr(sys.modules[module], name):
            found.append(getattr(sys.modules[module], name))
    if "omegaconf" in sys.modules:
        found.append(Any)  # what a DictConfig's metadata names as its element type
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        core = sys.modules.get("numpy._core.multiarray") or sys.modules.get("numpy.core.multiarray")
        if core is not None:
            found.append(core.scalar)
        found.append(numpy.dtype)
        found += {type(numpy.dtype(kind)) for kind in "?bhilqBHILQefd"}
    return found
