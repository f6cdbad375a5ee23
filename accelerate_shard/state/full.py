"""Full models and optimizers: state dicts, the files that Accelerate writes under DDP, and loading them."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_compiled_module
from accelerate.utils.constants import OPTIMIZER_NAME
from torch import nn
from torch.utils._pytree import tree_leaves

from torch_shard import Engine, ShardTensor
from torch_shard.errors import CheckpointError, StateDictError
from torch_shard.frontend import (
    all_read,
    copy_tensors,
    engine_holding,
    full_state_dict,
    numbered_optim_state_dict,
    refuse_inside,
)
from torch_shard.frontend.checkpoint import (
    FullLoad,
    Mismatches,
    Source,
    all_parameters,
    by_name,
    load_optimizer_by_name,
    make_durable,
    mismatches_by_name,
    open_full,
    param_names,
    parameters_loaded,
    size_of,
)

from .._private import compiled_inner
from ..models.full_weights import known, known_weights
from ..models.unwrap import engine_of
from .files import numbered, read
from .prepared import Prepared, Ranks

_WHOLE = re.compile(r"(model|pytorch_model)\.(safetensors|bin)")
_SHARD = re.compile(r"(model|pytorch_model)-\d{5}-of-\d{5}\.(safetensors|bin)")
_INDEX = re.compile(r"(model\.safetensors|pytorch_model\.bin)\.index\.json")


# -- a model by itself -------------------------------------------------------------------------------------------------


def get_state_dict(model: nn.Module, unwrap: bool) -> dict[str, Any] | None:
    """Return the full state dict; None for a model that is not sharded. Collective; see :class:`.mixin.StateMixin`."""
    engine = _engine(model)
    if engine is None:
        return None
    in_hook = known(compiled_inner(model))
    found = in_hook.state() if in_hook is not None else full_state_dict(engine, compiled_inner(model), rank0_only=True)
    if unwrap or not is_compiled_module(model):
        return found
    return {f"_orig_mod.{name}": value for name, value in found.items()}


def _engine(model: nn.Module) -> Engine | None:
    """Return the engine of a model, also of one that is a part of the sharded one; None if it is not sharded."""
    return engine_of(model) or engine_holding(compiled_inner(model))


def shard_in(obj: Any) -> ShardTensor | None:
    """Return a ShardTensor that `obj`, a module or a container, holds; None if it holds none. Not collective."""
    leaves = (list(leaf.parameters()) if isinstance(leaf, nn.Module) else [leaf] for leaf in tree_leaves(obj))
    return next((t for found in leaves for t in found if isinstance(t, ShardTensor)), None)


def save_model(
    model: nn.Module,
    folder: Any,
    max_shard_size: int | str,
    safe: bool,
    own: Callable[[nn.Module, Any, Any, bool], None],
) -> None:
    """Write a model's weights. Collective. `own` is Accelerate's method, which asks the Accelerator for the state dict."""
    engine, in_hook = _engine(model), known(compiled_inner(model))
    if in_hook is not None and not in_hook.is_first:
        return
    # The ranks do not all read where one rank calls this alone, as under `if accelerator.is_main_process`.
    if engine is None or in_hook is not None or not all_read(engine, "Accelerator.save_model"):
        own(model, folder, max_shard_size, safe)
        return
    ranks = Ranks([engine], "Accelerator.save_model")
    target = Path(os.path.abspath(os.fspath(folder)))

    def begin() -> int:
        refuse_inside(engine, ranks.what)
        if ranks.is_first and target.is_file():
            raise CheckpointError(f"Provided path ({target}) should be a directory, not a file")
        return size_of(max_shard_size)

    limit = ranks.each(begin, key=lambda size: (str(target), size, bool(safe)))
    nonce = ranks.begin()
    # This is in the same folder, so that the new files are put in their place by renaming.
    beside = target / f".model.saving-{nonce}"
    try:
        ranks.on_first(lambda: _make(target, beside))
        if safe and engine_of(model) is not None:
            engine.save_full(beside / "weights", format="safetensors", max_shard_size=limit)
        else:
            state = full_state_dict(engine, compiled_inner(model), rank0_only=True)
            with known_weights(compiled_inner(model), state, ranks.is_first):
                ranks.on_first(lambda: _quietly(own, model, beside / "weights", limit, safe))
        ranks.on_first(lambda: _put(beside / "weights", target, safe))
    finally:
        if ranks.is_first:
            shutil.rmtree(beside, ignore_errors=True)


def _quietly(own: Callable[..., None], *args: Any) -> None:
    """Call Accelerate's method without its log line, which would name the folder of the unfinished files."""
    log = logging.getLogger("accelerate.accelerator")
    was, log.disabled = log.disabled, True
    try:
        own(*args)
    finally:
        log.disabled = was


def _make(target: Path, beside: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(target):  # folders of saves that were killed
        if re.fullmatch(r"\.model\.saving-[0-9a-f]{16}", name):
            shutil.rmtree(target / name, ignore_errors=True)
    beside.mkdir()


def _put(new: Path, target: Path, safe: bool) -> None:
    """Move the new files to the target. In between there is no index rather than one that mixes old files and new ones."""
    suffix = ".safetensors" if safe else ".bin"
    names = sorted(os.listdir(new), key=lambda name: bool(_INDEX.fullmatch(name)))
    old = [name for name in os.listdir(target) if (_INDEX.fullmatch(name) or _SHARD.fullmatch(name)) and suffix in name]
    # An older unsharded file would be read first if both were there.
    old += [
        name for name in os.listdir(target) if _WHOLE.fullmatch(name) and name.endswith(suffix) and name not in names
    ]
    for name in sorted(old, key=lambda name: not _INDEX.fullmatch(name)):
        if _INDEX.fullmatch(name) or name not in names:
            (target / name).unlink()
    for name in names:
        os.replace(new / name, target / name)
    make_durable(target)


# -- optimizers -------------------------------------------------------------------------------------------------------


def optimizer_state(prepared: Prepared, optimizer: Any) -> Any:
    """Return the full ``optimizer.state_dict()``, as it is without sharding, on rank 0; an empty dict elsewhere. Collective."""
    engine = prepared.engine_for(optimizer)
    if engine is None:
        return optimizer.state_dict()
    return numbered_optim_state_dict(engine, optimizer, True, all_parameters(prepared.named()))


# -- loading ----------------------------------------------------------------------------------------------------------
# The caller compares all files on all ranks before it applies any of them. Nothing here is collective.


class FullModel:
    """A file with full weights of a sharded model, from which each rank copies its shards."""

    def __init__(self, engine: Engine, path: Path, strict: bool, dtype: torch.dtype | None) -> None:
        self._engine = engine
        self._load = FullLoad(engine, open_full(path), (), dtype, strict)

    @property
    def fingerprint(self) -> object:
        """A value that is equal on ranks that see the same file."""
        return self._load.file.fingerprint()

    def compare(self) -> None:
        """Raise a StateDictError with all that does not fit, or a CheckpointError for a damaged file."""
        self._load.compare()
        self._load.verify()

    def apply(self) -> None:
        """Load the model's state, and note that its parameters have changed."""
        self._load.load_model()
        parameters_loaded(self._engine)


class PlainModel:
    """A file with the weights of a model that is not sharded."""

    def __init__(self, model: nn.Module, path: Path, strict: bool, weights_only: bool) -> None:
        self.path, self._model, self._strict = path, model, strict
        self._state: Any = read(path, weights_only) if path.suffix == ".bin" else dict(open_full(path).values)
        self.fingerprint: object = sorted(self._state)

    def compare(self) -> None:
        """Raise a StateDictError with all that does not fit."""
        own = self._model.state_dict()
        places = {_place(own[name]) for name in self._state if name in own}
        missing = [name for name in own if name not in self._state and _place(own[name]) not in places]
        unexpected = [name for name in self._state if name not in own]
        problems = [
            f"{name} has shape {tuple(value.shape)} in the file and {tuple(own[name].shape)} here"
            for name, value in self._state.items()
            if name in own and isinstance(value, torch.Tensor) and value.shape != own[name].shape
        ]
        found = Mismatches(missing, unexpected, problems) if self._strict else Mismatches([], [], problems)
        found.refuse(str(self.path))

    def apply(self) -> None:
        """Load the model's state."""
        self._model.load_state_dict(self._state, strict=False)


def _place(value: Any) -> Any:
    """Return a key that is equal for tied weights."""
    return (value.data_ptr(), value.shape) if isinstance(value, torch.Tensor) and value.numel() else id(value)


class FullOptimizer:
    """A file with the state of one optimizer, which may hold parameters of several models."""

    def __init__(self, prepared: Prepared, ranks: Ranks, number: int, folder: Path, weights_only: bool) -> None:
        self.optimizer = prepared.optimizers[number]
        self.path = folder / numbered(OPTIMIZER_NAME, number)
        self._engine = engine = prepared.engine_for(self.optimizer)
        self._names: dict[int, str] = {}
        if not self.path.is_file():
            raise CheckpointError(
                f"{self.path} is missing: the checkpoint is incomplete, or of a run with fewer optimizers."
            )
        given = read(self.path, weights_only, (ranks.rank, ranks.world), mmap=True)
        if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
            raise CheckpointError(f"{self.path} holds no optimizer's state.")
        self._given: Any = given
        if engine is not None:
            sources: list[Source] = prepared.named()
            self._names = param_names(sources, self.optimizer)
            self._given = by_name(self.optimizer, self._names, given)

    @property
    def fingerprint(self) -> object:
        """A value that is equal on ranks that see the same file."""
        return self.path.stat().st_size

    def compare(self) -> None:
        """Raise a StateDictError with all that does not fit."""
        if self._engine is None:
            here = [len(group["params"]) for group in self.optimizer.param_groups]
            there = [len(group["params"]) for group in self._given["param_groups"]]
            problems = [] if here == there else [f"its groups have {there} parameters, and here {here}"]
            found = Mismatches([], [], problems)
        else:
            found = mismatches_by_name(self._engine, self.optimizer, self._names, self._given)
        found.refuse(f"{self.path}, for this {type(self.optimizer).__name__},")

    def apply(self) -> None:
        """Load the optimizer's state."""
        if self._engine is None:
            self.optimizer.load_state_dict(copy_tensors(self._given))
            return
        try:
            load_optimizer_by_name(self._engine, self.optimizer, self._names, self._given)
        except StateDictError as error:
            raise StateDictError(f"{self.path}: {error}") from error
