"""What both strategies share in saving and loading: plugins, folders, and failing on all ranks."""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from torch_shard import Engine
from torch_shard.errors import CheckpointError
from torch_shard.frontend import agree, each_rank, group_timeout
from torch_shard.frontend.checkpoint import Source, broadcast, each_at_length, find, hidden, save_contents, swap

from .._private import MixinBase, Private
from ..strategy.settings import StrategySettings
from . import files as _files
from .safe_load import classes_to_allow

T = TypeVar("T")


class SavingMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that has a plugin for single files, and an engine (``engine_or_none``) over whose ranks it saves."""

    _private: Private
    _settings: StrategySettings
    _checkpoint_io: Any
    _file_io: Any  # the class of CheckpointIO that is used where the user has given none

    # -- single files -------------------------------------------------------------------------------------------------
    @property
    def checkpoint_io(self) -> Any:
        """The plugin that reads and writes single files: the user's, or Lightning's own made to write beside the target."""
        if self._checkpoint_io is None:
            self._checkpoint_io = self._file_io()
        elif isinstance(self._checkpoint_io, self._private.WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self._file_io()  # ignored where the user has given one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: Any) -> None:
        self._checkpoint_io = io

    def _maps(self) -> bool:
        """Return True if a file may be mapped without asking the plugins.

        None of them may read in a way of its own, and ours must be the one that writes, since another may write in place, which
        changes the bytes of a mapped file.
        """
        *around, base = self._plugins()
        stock = self._private.WrappingCheckpointIO
        return isinstance(base, _files.FileMixin) and all(
            type(io).load_checkpoint is stock.load_checkpoint for io in around
        )

    def _plugins(self) -> list[Any]:
        """Return the plugin for single files, the one in it, and so on to the one that reads and writes itself."""
        found = [self.checkpoint_io]
        while isinstance(found[-1], self._private.WrappingCheckpointIO):
            found.append(found[-1].checkpoint_io)
        return found

    def _write_file(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        """Have the plugin write one file, on rank 0."""
        # Our own plugin replaces a folder itself.
        own = isinstance(self._plugins()[-1], _files.FileMixin)
        with contextlib.nullcontext() if own else _files.aside(path):
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    # -- folders ------------------------------------------------------------------------------------------------------
    def _write_folder(
        self,
        engine: Engine,
        contents: Mapping[str, Any],
        target: Path,
        asynchronous: bool,
        sources: Sequence[Source] | None = None,
    ) -> Any:
        """Write a folder by all ranks, also where a file is now. Collective.

        Returns the save that goes on in the background, or None. `sources` are the models in it, by default the engine's.
        """
        extra = contents["extra"] if self.is_global_zero else {}
        allowed = self._run_on_all(lambda: classes_to_allow(extra))
        # What rank 0 sees counts for all. Replacing a file is rare: nothing is gained by doing it in the background.
        is_file, nonce = self.broadcast((target.is_file() and not target.is_symlink(), secrets.token_hex(8)))
        with torch.serialization.safe_globals(allowed):
            if not is_file:
                return save_contents(engine, target, contents, sources=sources, asynchronous=asynchronous)
            beside = hidden(target, nonce)
            save_contents(engine, beside, contents, sources=sources)
            self._run_on_rank0(f"replace {target}", lambda: swap(beside, target))
            self._run_on_rank0(f"delete what was {target}", lambda: _files.delete(beside))
            return None

    # -- all ranks or none --------------------------------------------------------------------------------------------
    def _run_on_all(self, function: Callable[[], T]) -> T:
        """Run a function on every rank; all return, or all raise. Collective."""
        engine, what = self.engine_or_none, "loading or saving a checkpoint"
        if engine is None:
            return each_rank(function, what, group_timeout(self.root_device))
        return each_at_length(engine, what, function)

    def _from_rank0(self, value: T, what: str) -> T:
        """Return rank 0's value on every rank. Collective.

        Where a module is sharded, a rank that does not come is an error on the others.
        """
        engine = self.engine_or_none
        if engine is None:
            return self.broadcast(value)  # type: ignore[no-any-return]
        # A broadcast alone would let rank 0 go on without the others.
        agree(engine, what)
        return broadcast(engine, value, what)

    def _run_on_rank0(self, what: str, function: Callable[[], None]) -> None:
        """Run a function on rank 0; its failure is raised on all ranks. Collective."""
        failure: Exception | None = None
        if self.is_global_zero:
            try:
                function()
            except Exception as error:
                failure = error
        # Without this the other ranks would wait in the barrier that follows until the process group's timeout.
        error_text = self.broadcast(None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if error_text is not None:
            raise OSError(f"rank 0 could not {what}: {error_text}")


def existing(path: Any) -> Any:
    """Return the path of the checkpoint to read for `path`: the path itself, if something is there.

    To find a SLURM job's newest checkpoint, Lightning reads a number from every name with "hpc_ckpt_" in it, leftovers of a
    killed save included. This function chooses among the names that are checkpoints.
    """
    if not _files.is_local(path) or Path(path).exists():
        return path
    if re.fullmatch(r"hpc_ckpt_\d+\.ckpt", Path(path).name):
        found = {p for p in Path(path).parent.glob("hpc_ckpt_*.ckpt") if re.fullmatch(r"hpc_ckpt_\d+", p.stem)}
        if found:
            return str(max(found, key=lambda p: int(p.stem.removeprefix("hpc_ckpt_"))))
    if Path(path).is_symlink():
        raise CheckpointError(f"{path} is a link to {Path(path).readlink()}, where there is no checkpoint.")
    # A save that was killed may have left the older one under another name, where names can't be exchanged.
    return str(find(Path(path).absolute()))
