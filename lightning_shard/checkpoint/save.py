"""What the strategies of the Trainer and of Fabric share in saving and loading: plugins, folders, failing on all ranks."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from torch_shard import Engine
from torch_shard.errors import CheckpointError
from torch_shard.frontend.checkpoint import Source, broadcast, each, find, save_contents

from .._private import MixinBase, Shared
from ..strategy.settings import StrategySettings
from . import files as _files
from .safe_load import classes_to_allow

__all__ = ["SavingMixin", "existing"]

T = TypeVar("T")


class SavingMixin(MixinBase):  # type: ignore[misc]
    """A strategy with a plugin for single files, and an engine (``engine_or_none``) whose ranks act together."""

    _private: Shared
    _settings: StrategySettings
    _checkpoint_io: Any
    _file_io: Any  # the class of CheckpointIO that is used where the user has given none

    # -- single files -------------------------------------------------------------------------------------------------
    @property
    def checkpoint_io(self) -> Any:
        """Reads and writes single files: the user's plugin, or Lightning's own made to write beside the target."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._file_io()
        elif isinstance(self._checkpoint_io, self._private.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self._file_io()  # ignored where the user has given one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def _maps(self) -> bool:
        """Whether a file may be mapped past the plugins: none of them reads in a way of its own, and none that is not ours
        writes, since bytes of a mapped file that is written in place change or are gone."""
        io, wrapping = self.checkpoint_io, self._private.WrappingCheckpointIO
        while isinstance(io, wrapping):
            if type(io).load_checkpoint is not wrapping.load_checkpoint:
                return False
            io = io.checkpoint_io
        return isinstance(io, _files.FileMixin)

    def _base_io(self) -> Any:
        """The plugin that reads and writes, without those around it."""
        io = self.checkpoint_io
        while isinstance(io, self._private.WrappingCheckpointIO):
            io = io.checkpoint_io
        return io

    # -- folders ------------------------------------------------------------------------------------------------------
    def _write_folder(
        self,
        engine: Engine,
        contents: Mapping[str, Any],
        target: Path,
        asynchronous: bool,
        sources: Sequence[Source] | None = None,
    ) -> Any:
        """Write a folder by all ranks, also where a file is now; what is returned is a save that goes on, or None. Collective.

        `sources`: the models that are in it, by default the engine's.
        """
        extra = contents["extra"] if self.is_global_zero else {}
        allowed = self._together(lambda: classes_to_allow(extra))
        # Rank 0's view for all. Replacing a file is rare, so that nothing is gained by doing it in the background.
        is_file, nonce = self.broadcast((target.is_file() and not target.is_symlink(), secrets.token_hex(8)))
        with torch.serialization.safe_globals(allowed):
            if not is_file:
                return save_contents(engine, target, contents, sources=sources, asynchronous=asynchronous)
            beside = _files.hidden(target, nonce)
            save_contents(engine, beside, contents, sources=sources)
            self._on_first(f"replace {target}", lambda: _files.swap(beside, target))
            self._on_first(f"delete what was {target}", lambda: _files.delete(beside))
            return None

    # -- together -----------------------------------------------------------------------------------------------------
    def _together(self, function: Callable[[], T]) -> T:
        """Run it on every rank; all return, or all raise. Collective."""
        engine = self.engine_or_none
        if engine is None:
            return _on_all(function)
        what = "loading or saving a checkpoint"
        nonce = broadcast(engine, secrets.token_hex(8), what)  # with which it may take its time
        return each(engine, what, function, nonce=nonce)

    def _told(self, value: T, what: str) -> T:
        """Rank 0's value on every rank. Collective; a rank that is not there is an error on the others where a module is
        sharded."""
        engine = self.engine_or_none
        if engine is None:
            return self.broadcast(value)  # type: ignore[no-any-return]
        # A broadcast alone would let rank 0 go on without the others.
        each(engine, what, lambda: None)
        return broadcast(engine, value, what)

    def _on_first(self, what: str, function: Callable[[], None]) -> None:
        """Run it on rank 0; a failure is raised on all ranks. Collective."""
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                function()
            except Exception as error:
                failure = error
        # Without this the other ranks would wait in the barrier that follows until the process group's timeout.
        said = self.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if said is not None:
            raise OSError(f"rank 0 could not {what}: {said}")


def existing(path: Any) -> Any:
    """The path, where there is something; Lightning's choice of the newest SLURM checkpoint put right.

    It takes the digits of every name with "hpc_ckpt_" in it for a number, those of what a killed save has left, too.
    """
    if not _files.is_local(path) or Path(path).exists():
        return path
    if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(path).name):
        found = {p for p in Path(path).parent.glob("hpc_ckpt_*.ckpt") if re.fullmatch(r"hpc_ckpt_\d+", p.stem)}
        if found:
            return str(max(found, key=lambda p: int(p.stem.removeprefix("hpc_ckpt_"))))
    if Path(path).is_symlink():
        raise CheckpointError(f"{path} is a link to {Path(path).readlink()}, where there is no checkpoint.")
    # One that a save has lost its name of, on a file system without an exchange of names.
    return str(find(Path(path).absolute()))


def _on_all(function: Callable[[], T]) -> T:
    """The same over the default process group, where no module is sharded yet."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = function()
    except Exception as problem:
        error = problem
    if dist.is_available() and dist.is_initialized():
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if error is None else f"{type(error).__name__}: {error}")
        for rank, problem_there in enumerate(said):
            if error is None and problem_there is not None:
                raise CheckpointError(f"rank {rank} has failed: {problem_there}")
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
