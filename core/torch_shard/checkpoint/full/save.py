"""Saving a full checkpoint: gathered a unit at a time, written by rank 0, there in one step.

::

    c.pt, c.safetensors        .c.pt.saving-0123abcd/c.pt                      renamed over the target
    c/ (safetensors)           .c.saving-0123abcd/model-00001-of-....          exchanged with the target

As with sharded checkpoints (:mod:`..format.atomic_directory`), a process that is killed leaves the old one or the new one,
and a hidden directory that the next save removes.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each
from ...errors import CheckpointError, ConfigError
from ...state import model_state
from ..format.atomic_directory import Saving, commit, discard, sync
from ..format.dcp_metadata import METADATA
from ..format.manifest import MANIFEST
from ..format.mmap_buffer import buffer
from ..format.safetensors import WEIGHTS, SafetensorsWriter, size_of
from ..format.torch_file import Slot, TorchFileWriter, check_loadable
from ..misfits import check_dtype
from ..sharded.entries import EXTRA, MODEL, OPTIMIZER, Optimizers
from .stream import ModelStream, OptimizerStream
from .tied_weights import chosen_names

__all__ = ["keep_others", "refuse_to_lose", "save_full"]

_SUFFIX = ".safetensors"
_OTHER_WEIGHTS = re.compile(r"pytorch_model.*\.bin(\.index\.json)?|tf_model.*\.h5|flax_model.*\.msgpack")
"""Names of weights that are not safetensors, of which a directory should not have both."""


def save_full(
    engine: Any,
    path: str | os.PathLike[str],
    optimizer: Any = None,
    *,
    extra: Any = None,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write a full checkpoint of `engine`'s model; see :meth:`torch_shard.Engine.save_full`. Collective."""
    runtime, what = engine._runtime, "engine.save_full"
    first = runtime.collectives.world_rank == 0

    def prepare() -> tuple[Path, str, int]:
        engine.finish_saving()
        model_state.refuse_inside(runtime, what)
        check_dtype(dtype)
        return _target(path), _form(Path(path), format, first), size_of(max_shard_size)

    # Only rank 0's path counts, and what is there: other nodes need not have it.
    target, form, limit = each(runtime, what, prepare, key=(format, dtype, max_shard_size))
    form, nonce = broadcast(runtime, (form, secrets.token_hex(8)), what)

    def contents() -> _Contents:
        found = _Contents(engine, Optimizers.of(optimizer), extra, dtype)
        if form != "torch":
            found.refuse_for_safetensors()
        return found

    saved = each(runtime, what, contents, key=lambda found: found.key)
    for stream in saved.optimizers:
        stream.describe(what)

    def files() -> _Output:
        if form == "torch":
            return _TorchOutput(target, saved)
        return _SafetensorsOutput(target, saved, engine.model, limit)

    output = each(runtime, what, files)
    parts: list[ModelStream | OptimizerStream] = [saved.model, *saved.optimizers]
    held: list[Saving] = []  # on rank 0
    done = False
    try:

        def begin() -> torch.Tensor:
            if first:
                output.check()
                held.append(Saving.begin(target, nonce, output.refuse))
                output.begin(held[0])
            return buffer(max(part.nbytes for part in parts), runtime.collectives.device)

        memory = each(runtime, what, begin, nonce=f"{nonce}/begin")
        step = 0

        def put(values: Any) -> None:
            nonlocal step
            step += 1
            write = functools.partial(_write, output, values) if first else _nothing
            each(runtime, what, write, nonce=f"{nonce}/{step}")

        for part in parts:
            part.send(put, what, memory)
        each(runtime, what, lambda: output.commit(held[0]) if first else None, nonce=f"{nonce}/finish")
        done = True
        each(runtime, what, lambda: discard(target, nonce) if first else None, nonce=f"{nonce}/tidy")
    finally:
        output.abandon()
        for saving in held:
            saving.close(remove=not done)


def _nothing() -> None:
    """Do nothing, as the other ranks do while rank 0 writes."""


def _write(output: _Output, values: Any) -> None:
    found: Iterable[tuple[Slot, torch.Tensor]] = values()
    for slot, tensor in found:
        output.put(slot, tensor)


def _target(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(os.fspath(path)))
    if not target.name:
        raise ConfigError(f"path: {path!r} is no place for a checkpoint; give a file or a directory of its own.")
    return target


def _form(path: Path, format: str | None, look: bool) -> str:
    """Return ``"torch"``, ``"safetensors"`` (a directory) or ``".safetensors"`` (one file). `look` at what is there."""
    if format not in (None, "torch", "safetensors"):
        raise ConfigError(f"format must be 'torch', 'safetensors' or None, not {format!r}.")
    if path.suffix == _SUFFIX and format != "torch":
        return _SUFFIX
    if format is None:
        named = path.suffix[1:].isalpha()  # what "llama-3.1-8b" ends in is no suffix
        return "safetensors" if not named or look and path.is_dir() else "torch"
    return format


class _Contents:
    """What goes into the file."""

    def __init__(self, engine: Any, optimizers: Optimizers, extra: Any, dtype: torch.dtype | None) -> None:
        runtime = engine._runtime
        self.model = ModelStream(engine.model, runtime, dtype)
        self.entries = optimizers.entries
        self.several = bool(optimizers.entries) and (len(self.entries) > 1 or len(self.entries[0][1]) > 1)
        self.optimizers = [OptimizerStream(engine.model, runtime, o) for _, held in self.entries for o in held]
        self.extra = extra if runtime.collectives.world_rank == 0 else None
        self.has_extra = extra is not None
        self.key = (self.model.key, [where for where, _ in self.entries], [stream.key for stream in self.optimizers])

    def refuse_for_safetensors(self) -> None:
        if self.optimizers or self.has_extra:
            raise ConfigError(
                "safetensors files hold a model only, no optimizer and no extra. Save these with engine.save, or everything in a "
                'torch file (format="torch").'
            )
        for name, value in self.model.structure.items():
            if not isinstance(value, Slot):
                raise CheckpointError(
                    f"{name} can't be saved: safetensors files hold tensors only, and this is {type(value).__name__}. Save a "
                    'torch file (format="torch").'
                )

    def structure(self) -> Any:
        """Return the structure of the torch file. On rank 0, when the optimizers are described."""
        if not self.optimizers and self.extra is None:
            return self.model.structure
        found: dict[str, Any] = {MODEL: self.model.structure}
        states = [stream.structure for stream in self.optimizers]
        if states and len(self.entries[0][0]) > 1:
            found[OPTIMIZER] = {where[-1]: state for (where, _), state in zip(self.entries, states, strict=True)}
        elif states:
            found[OPTIMIZER] = states if self.several else states[0]
        if self.extra is not None:
            found[EXTRA] = self.extra
        return found


# -- files ------------------------------------------------------------------------------------------------------------
# All of this is rank 0's.


class _TorchOutput:
    """One torch file."""

    def __init__(self, target: Path, saved: _Contents) -> None:
        self.target, self.saved = target, saved
        self.writer: TorchFileWriter | None = None

    def check(self) -> None:
        """Raise for what could not be loaded again."""
        model = self.saved.model.structure
        for name, value in model.items():
            if not isinstance(value, Slot):
                check_loadable(value, name)
        check_loadable(list(model), "a name in the state dict")
        # Modules and hooks add to it what they like.
        check_loadable(getattr(model, "_metadata", None), "the state dict's _metadata")
        for (where, _), stream in zip(self.saved.entries, self.saved.optimizers, strict=False):
            check_loadable(stream.structure, ".".join(where))
        check_loadable(self.saved.extra, EXTRA)

    def refuse(self, target: Path) -> None:
        """Raise where something is at the target that must not be replaced."""
        _refuse_directory(target)

    def begin(self, saving: Saving) -> None:
        self.writer = TorchFileWriter(saving.path / self.target.name, self.saved.structure())

    def put(self, slot: Slot, tensor: torch.Tensor) -> None:
        assert self.writer is not None
        self.writer.write(slot, tensor)

    def commit(self, saving: Saving) -> None:
        assert self.writer is not None
        self.writer.close()
        _replace(saving.path / self.target.name, self.target)

    def abandon(self) -> None:
        if self.writer is not None:
            self.writer.abandon()


class _SafetensorsOutput:
    """A directory of safetensors files, or one such file."""

    def __init__(self, target: Path, saved: _Contents, model: torch.nn.Module, limit: int) -> None:
        self.target, self.limit = target, limit
        self.single = target.name if target.suffix == _SUFFIX else None
        order = saved.model.order
        kept = chosen_names(model, [saved.model.names(slot) for slot in order])
        self.name_of = {id(slot): name for slot, name in zip(order, kept, strict=True)}
        self.entries = {self.name_of[id(slot)]: (slot.shape, slot.dtype) for slot in order}
        self.tied = {n: self.name_of[id(slot)] for slot in order for n in saved.model.names(slot)}
        self.tied = {name: of for name, of in self.tied.items() if name != of}
        self.writer: SafetensorsWriter | None = None

    def check(self) -> None:
        """Do nothing: everything has been checked."""

    def refuse(self, target: Path) -> None:
        """Raise where something is at the target that must not be replaced."""
        refuse_to_lose(target, self.single is not None)

    def begin(self, saving: Saving) -> None:
        self.writer = SafetensorsWriter(
            saving.path, self.entries, tied=self.tied, max_shard_size=self.limit, single=self.single
        )

    def put(self, slot: Slot, tensor: torch.Tensor) -> None:
        assert self.writer is not None
        self.writer.write(self.name_of[id(slot)], tensor)

    def commit(self, saving: Saving) -> None:
        assert self.writer is not None
        self.writer.finish()
        if self.single is not None:
            _replace(saving.path / self.single, self.target)
            return
        if self.target.is_dir():
            keep_others(self.target, saving.path)
        commit(saving, self.target)

    def abandon(self) -> None:
        """Drop what is held."""
        self.writer = None


_Output = _TorchOutput | _SafetensorsOutput


def _refuse_directory(target: Path) -> None:
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; give the name of a file in it.")


def refuse_to_lose(target: Path, single: bool) -> None:
    """Raise where safetensors would replace a directory that holds more than a model and files beside it. Not collective.

    Raises:
        CheckpointError: names what would be lost, and the remedy.
    """
    if single:
        return _refuse_directory(target)
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(
            f"{target} is a file, and the safetensors form is a directory. Give another path, one that ends in .safetensors, or "
            'format="torch".'
        )
    names = sorted(os.listdir(target)) if target.is_dir() else []
    if MANIFEST in names or METADATA in names:
        raise CheckpointError(f"{target} holds a sharded checkpoint, which would be lost. Give another path.")
    below = [name for name in names if (target / name).is_dir() and not (target / name).is_symlink()]
    if below:
        raise CheckpointError(
            f"{target} has directories in it ({', '.join(below[:3])}), and a save replaces it as a whole. Give another path."
        )
    other = [name for name in names if _OTHER_WEIGHTS.fullmatch(name)]
    if other:
        raise CheckpointError(
            f"{target} holds other weights ({', '.join(other[:3])}), so that it would not be clear which ones count. Delete "
            "them, or give another path."
        )
    return None


def _replace(file: Path, target: Path) -> None:
    os.replace(file, target)
    sync(target.parent)


def _copy(old: Path, new: Path) -> None:
    if old.is_file():
        shutil.copy2(old, new)
    else:  # a link to a directory or to nothing, which may count from where it is
        os.symlink(os.path.realpath(old), new)


def keep_others(old: Path, new: Path) -> None:
    """Put what is beside the weights (a configuration, a tokenizer) into the new directory, too.

    Where `old` is a link, what it leads to stays (a download cache, say), and the new directory shares nothing with it.
    """
    linked = old.is_symlink()
    for name in sorted(os.listdir(old)):
        if WEIGHTS.fullmatch(name) or os.path.lexists(new / name):
            continue
        if linked:
            _copy(old / name, new / name)
            continue
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(old / name, new / name, follow_symlinks=False)
    os.chmod(new, stat.S_IMODE(old.stat().st_mode))
