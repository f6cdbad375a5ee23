"""Sharded checkpoints: a folder that all ranks write. The Trainer's dict is put in it as follows, and made of it again.

::

    checkpoint["state_dict"]           model.<name>
    checkpoint["optimizer_states"]     optimizer.state..., of several optimizer.<number>.state...
    everything else                    extra, one object; ShardTensors in it sliced.<number>.<name of the parameter>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, ShardTensor
from torch_shard.errors import ConfigError, StateDictError
from torch_shard.frontend import load_optim_state_dict, with_shard
from torch_shard.frontend.checkpoint import (
    EXTRA,
    EXTRA_SHARDS,
    MODEL,
    OPTIMIZER,
    Contents,
    Source,
    each,
    joined,
    param_names,
    read_contents,
    sources_of,
    split,
)
from torch_shard.frontend.checkpoint import optimizer_state as named_state

from . import full as _full
from .files import is_local
from .full import names_of
from .safe_load import load_safely

_META = "meta.pt"  # where Lightning's own strategies keep everything but model and optimizers

# -- saving -----------------------------------------------------------------------------------------------------------


def model_state(engine: Engine) -> dict[str, Any]:
    """Return the state dict with ShardTensors, which share memory with the parameters. Not collective."""
    return engine.state_dict(form="sharded", offload_to_cpu=False)


def optimizer_state(engine: Engine, optimizer: Any, sources: Sequence[Source] | None = None) -> dict[str, Any]:
    """Return state and groups of one optimizer by parameter name, with ShardTensors. Not collective.

    `sources` are the models that its parameters belong to, by default the engine's.
    """
    return named_state(sources or sources_of(engine, None), [optimizer])


def contents_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is written of the Trainer's dict, as ``on_save_checkpoint`` has left it."""
    rest = dict(checkpoint)
    contents: dict[str, Any] = {MODEL: rest.pop("state_dict", {})}
    states = rest.get("optimizer_states")
    if states:  # an empty list stays: it says that there was no optimizer, and not that its state is missing
        del rest["optimizer_states"]
        contents[OPTIMIZER] = states[0] if len(states) == 1 else {str(n): state for n, state in enumerate(states)}
    contents[EXTRA], extra_shards = split(rest)
    if extra_shards:
        contents[EXTRA_SHARDS] = extra_shards
    return contents


def check_names(rank: int, names: Sequence[str], of_first: Sequence[str]) -> None:
    """Raise if a hook has left other entries in the state dict than on rank 0: what one rank drops, another would write.

    Raises:
        StateDictError: entries are missing or are more than rank 0's.
    """
    known = set(names)
    missing, more = [name for name in of_first if name not in known][:3], sorted(known.difference(of_first))[:3]
    if missing or more:
        raise StateDictError(
            f"rank {rank}: checkpoint['state_dict'] has other entries than on rank 0 (missing: {missing}, more: {more}). "
            "In the sharded form every rank writes: on_save_checkpoint must make the same changes on all ranks."
        )


def local_path(path: Any) -> Path:
    """Return the folder's absolute path.

    Raises:
        ConfigError: `path` is a URL.
    """
    if not is_local(path):
        raise ConfigError(
            f"{path}: a sharded checkpoint is written by all ranks into a folder on a file system that they share; use "
            "such a path, or ShardStrategy(state_dict_type='full')."
        )
    return Path(path).absolute()


# -- loading ----------------------------------------------------------------------------------------------------------


class UnreadStates(list[Any]):
    """The groups of optimizers whose state is still to be read, from a folder that does not name their parameters.

    Lightning's other strategies write such folders. The state can be read when the optimizers exist.
    """

    def __init__(self, settings: Sequence[Any], folder: Path, weights_only: bool | None) -> None:
        super().__init__(settings)
        self._folder, self._weights_only = folder, weights_only

    def read(self, engine: Engine, optimizers: Sequence[Any]) -> list[Any]:
        """Return the states for these optimizers, with the folder's state and this list's options. Collective."""
        if len(self) != len(optimizers):  # the caller raises an error that needs no state
            return list(self)
        found = read_parts(engine, self._folder, optimizers, self._weights_only)[0].optimizers
        return [{**read, **own, "state": own["state"] or read["state"]} for own, read in zip(self, found, strict=True)]


def read_folder(
    engine: Engine, folder: Path, with_state: bool, weights_only: bool | None, version: str
) -> dict[str, Any]:
    """Return a sharded checkpoint, of this package or of Lightning's other strategies, as the Trainer's dict. Collective.

    Args:
        engine: the model's engine.
        folder: the checkpoint's folder.
        with_state: True if the optimizers' state will be loaded, too.
        weights_only: see :func:`.safe_load.load_safely`.
        version: Lightning's version, for checkpoints that have none.
    """
    found, rest = read_parts(engine, folder, (), weights_only, named_state=with_state)
    checkpoint = {**rest, "state_dict": found.model}
    checkpoint.setdefault("pytorch-lightning_version", version)
    if found.optimizers:
        known = found.with_state or not with_state
        checkpoint["optimizer_states"] = (
            found.optimizers if known else UnreadStates(found.optimizers, folder, weights_only)
        )
    return checkpoint


def read_parts(
    engine: Engine,
    folder: Path,
    optimizers: Sequence[Any],
    weights_only: bool | None,
    models: Mapping[str, Engine] | None = None,
    named_state: bool = False,
) -> tuple[Contents, dict[str, Any]]:
    """Return models and optimizers of a folder, and what else was saved. Collective.

    `models` and `named_state` are those of :func:`torch_shard.frontend.checkpoint.read_contents`.
    """

    def read(file: Any, what: str) -> Any:
        return load_safely(lambda safe: torch.load(file, map_location="cpu", weights_only=safe), what, weights_only)

    def unpickle(name: str, file: Any) -> Any:
        return read(file, f"{folder}: {name}")

    beside = folder / _META
    meta = each(engine, "loading a checkpoint", lambda: read(beside, str(beside)) if beside.is_file() else None)
    found = read_contents(engine, folder, optimizers, named_state=named_state, models=models, unpickle=unpickle)
    rest = meta if isinstance(meta, dict) else found.extra if isinstance(found.extra, dict) else {}
    rest = joined(rest, found.extra_shards)
    return found, rest


def is_named(state: Any) -> bool:
    """Return True if an optimizer's state is by parameter name, as in sharded checkpoints."""
    if not isinstance(state, Mapping):
        return False
    return any(isinstance(name, str) for group in state.get("param_groups", ()) for name in group["params"])


def load_optimizer(engine: Engine, optimizer: Any, state: Mapping[str, Any], parameters: nn.Module) -> None:
    """Load state by parameter name, or by number as a single device has it. Collective.

    `parameters` is as for :func:`.full.optimizer_state`.
    """
    if not is_named(state):
        _full.load_optimizer(engine, optimizer, state, parameters)
        return
    names = names_of(engine, optimizer, parameters)
    devices = {names[id(p)]: p.device for group in optimizer.param_groups for p in group["params"]}
    placed = {
        name: {key: _on(value, devices[name]) for key, value in own.items()} if name in devices else own
        for name, own in state["state"].items()
    }
    load_optim_state_dict(engine, optimizer, {**state, "state": placed}, parameters)


def renamed(
    state: dict[str, Any], engine: Engine, optimizer: Any, sources: Sequence[Source], parameters: nn.Module
) -> dict[str, Any]:
    """Return state that has the names of `sources`, as in a folder, with the names of `parameters`. Not collective."""
    if not is_named(state):
        return state
    saved, names = param_names(sources, optimizer), names_of(engine, optimizer, parameters)
    new = {saved[id(p)]: names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    groups = [{**group, "params": [new.get(name, name) for name in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {new.get(n, n): own for n, own in state["state"].items()}, "param_groups": groups}


def _on(value: Any, device: torch.device) -> Any:
    # Shards were read into host memory.
    if isinstance(value, ShardTensor) and value.device != device:
        return with_shard(value, value.to_local().to(device))
    return value
