"""The half of :class:`.engine.Engine` that saves and loads: state dicts, optimizer state, checkpoints."""

from __future__ import annotations

import abc
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .errors import CheckpointError, ConfigError
from .runtime.runtime import Runtime
from .state import model_state, optimizer_state, sharded_state

if TYPE_CHECKING:  # torch.distributed.checkpoint takes time to import
    from .checkpoint.sharded.async_save import PendingSave
    from .checkpoint.sharded.host_snapshot import Staging

__all__ = ["EngineState"]


class EngineState(abc.ABC):
    """Methods of the engine; each only says what it does, and other modules do it."""

    _runtime: Runtime
    _pending: PendingSave | None = None  # the last asynchronous save
    _staging: Staging | None = None  # what such saves copy to

    @property
    @abc.abstractmethod
    def model(self) -> nn.Module:
        """The sharded module."""

    # -- state --------------------------------------------------------------------------------------------------
    def state_dict(self, *, form: str = "full", rank0_only: bool = True, offload_to_cpu: bool = True) -> dict[str, Any]:
        """The model's state dict, with the names that the unsharded model gives. Collective where `form` is ``"full"``.

        Args:
            form: ``"full"``: plain, whole tensors, as the unsharded model has them, in new memory. ``torch.save`` it on rank
                0, with a ``torch.distributed.barrier()`` behind it on all ranks.
                ``"sharded"``: ShardTensors of global shape, which share memory with the parameters; for
                torch.distributed.checkpoint.
                ``"local"``: this rank's slices, plain and 1-D, which share that memory, too. Only the same number of ranks,
                strategy and units can load them.
            rank0_only: of the full form other ranks get an empty dict, and hold no more than two whole units at a time.
            offload_to_cpu: the tensors are on the CPU, copied there if need be.

        Returns:
            The module's own dict: names, strides and dtypes are as before sharding.

        Raises:
            ConfigError: another `form`.
            UnitStateError: the full form inside a forward or :meth:`gathered`.
        """
        if form == "sharded":
            return sharded_state.sharded(self.model, self._runtime, offload_to_cpu)
        if form == "local":
            return sharded_state.local(self.model, self._runtime, offload_to_cpu)
        if form != "full":
            raise ConfigError(f"form must be 'full', 'sharded' or 'local', not {form!r}.")
        return model_state.state_dict(self.model, self._runtime, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True, *, form: str = "full") -> Any:
        """Load tensors by name. Collective; nothing is changed unless everything fits.

        Args:
            state_dict: on every rank, on any device; each rank keeps its slices. It may come from any number of ranks
                or from plain training.
            strict: missing and unexpected entries are errors.
            form: ``"full"`` or ``"sharded"``: whole tensors, ShardTensors (cut in any way, by an engine that is still open),
                or some of each. ``"local"``: the slices that :meth:`state_dict` gave on this rank.

        Returns:
            What ``Module.load_state_dict`` returns: the missing and the unexpected keys.

        Raises:
            StateDictError: on all ranks, with every missing, unexpected and wrongly shaped entry.
            UnitStateError: inside a forward or :meth:`gathered`.
        """
        if form not in ("full", "sharded", "local"):
            raise ConfigError(f"form must be 'full', 'sharded' or 'local', not {form!r}.")
        if form == "local":
            state_dict = sharded_state.from_local(self.model, self._runtime, state_dict)
        return model_state.load_state_dict(self.model, self._runtime, state_dict, strict)

    def optim_state_dict(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
        """Whole optimizer state by parameter name, on the CPU. Collective.

        Of optimizers that step on whole matrices (:mod:`torch_shard.optim`) each rank has some parameters' state, which
        ``optimizer.state_dict()`` gives; this is all of it.

        Args:
            optimizer: any that holds parameters of this model.
            rank0_only: other ranks get an empty dict.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: the optimizer's own state dict
            with names in place of numbers, and state of the parameters' global shapes.

        Raises:
            StateDictError: the optimizer holds a parameter that is not this model's. One that holds those of several sharded
                models is saved by :meth:`save` with `models`.
        """
        return optimizer_state.optim_state_dict(self._runtime, optimizer, rank0_only, self.model)

    def load_optim_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`optim_state_dict` gave, on any number of ranks. Collective: every rank needs the dict.

        Parameters are matched by name, groups by position; hyperparameters come from the dict. A parameter without
        state needs an empty entry where the optimizer holds state for it now.

        Raises:
            StateDictError: on all ranks, with everything that does not fit; nothing has been loaded.
        """
        optimizer_state.load_optim_state_dict(self._runtime, optimizer, state_dict, self.model)

    # -- checkpoints ----------------------------------------------------------------------------------------------
    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        extra: Any = None,
        models: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> PendingSave | None:
        """Write a checkpoint that any number of ranks can load. Collective.

        Each rank writes its own slices, in the parameters' shapes and under their names, in the format of
        torch.distributed.checkpoint. The directory appears in one step when everything in it is durable: a process that is killed
        leaves what was at `path` before. It belongs to the checkpoint, so that the next save to it deletes what else is there.

        Args:
            path: the directory, the same on all ranks, on a file system that they share.
            optimizer: one, several in a list (their parameters differ), or a dict of them by name.
            extra: plain Python objects and tensors, which :meth:`load` returns; rank 0's are saved, the other ranks' are not
                looked at.
            models: further sharded models, by name: engines, or modules given to :func:`torch_shard.shard`. An optimizer may
                hold the parameters of several of them.
            keep: delete the oldest checkpoints beside this one, when it is whole, so that so many remain with it. The name
                needs a number, as in ``step-100``: only directories whose names differ in it alone, and that have a manifest,
                count.
            asynchronous: return when everything has been copied to host memory; threads write the files while training goes
                on. That memory, as much as this rank holds of parameters and optimizer state, is kept for the next time, until
                :meth:`close`. The next :meth:`save`, :meth:`load`, :meth:`finish_saving` or :meth:`close` waits for this one, and
                raises its failure on all ranks. A program that ends waits, too.

        Returns:
            Of an asynchronous save, an object with ``done()`` and ``wait()``; else None.

        Raises:
            CheckpointError: on all ranks: the path can't be written, the disk is full, the ranks don't share the path, `extra` or
                the optimizer's state holds objects that would not be loaded again. Nothing has changed. Or the asynchronous save
                before this one has failed; then this one has not begun.
            ConfigError: an argument is wrong.
            DivergenceError: the ranks passed different arguments.
            UnitStateError: inside a forward or ``engine.gathered()``.
        """
        from .checkpoint import save

        return save(self, path, optimizer, extra=extra, models=models, keep=keep, asynchronous=asynchronous)

    def finish_saving(self) -> None:
        """Wait until the last asynchronous save is durable, if there was one. Not collective.

        Raises:
            CheckpointError: it has failed; raised once, on every rank that asks.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.wait()
        except CheckpointError:
            self._pending = None
            raise
        self._pending = None  # not where the wait was interrupted

    def save_full(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        extra: Any = None,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write the whole model as plain torch, or Hugging Face's tools, read it. Collective.

        Parameters are gathered one unit at a time and rank 0 writes them, so that no rank holds more than two units above its
        slices (rank 0 one output file besides, where it writes safetensors). Only rank 0 needs to see `path`. What was there is
        replaced in one step, when everything is durable.

        In a torch file is the model's state dict itself, for ``model.load_state_dict(torch.load(path))`` in plain torch. With an
        optimizer or `extra` it is ``{"model": ..., "optimizer": ..., "extra": ...}``, where optimizer state is by number, as
        ``optimizer.state_dict()`` of an unsharded model has it: several are a list, or a dict by name.

        In safetensors are tensors by name, of tied weights one. A directory has ``model.safetensors``, or
        ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``, as transformers' ``from_pretrained`` reads it;
        its other files are kept.

        Args:
            path: of the torch file, of one safetensors file (``.safetensors``), or of the directory.
            optimizer: one, several in a list, or a dict of them by name; torch files only.
            extra: plain Python objects and tensors; rank 0's are saved; torch files only.
            format: ``"torch"`` or ``"safetensors"``. By default the name decides: safetensors for ``.safetensors``, for a
                directory that exists and for a name without a suffix of letters; else torch.
            dtype: what the model's floating-point entries become in the file; None leaves them as they are.
            max_shard_size: of safetensors files in a directory: bytes, or text such as ``"5GB"``. One tensor is never divided.

        Raises:
            CheckpointError: on all ranks: the path can't be written, the disk is full, what is at the path would be lost, or
                there are objects that would not be loaded again, or not in this format. What was there is as it was.
            ConfigError: an argument is wrong, or an optimizer or `extra` was given for safetensors.
            DivergenceError: the ranks passed different arguments.
            StateDictError: the optimizer holds a parameter that is not this model's.
            UnavailableError: the safetensors library is not installed.
            UnitStateError: inside a forward or :meth:`gathered`.
        """
        from .checkpoint import save_full

        save_full(self, path, optimizer, extra=extra, format=format, dtype=dtype, max_shard_size=max_shard_size)

    def load(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        models: Mapping[str, Any] | None = None,
    ) -> Any:
        """Load a checkpoint of :meth:`save`, :meth:`save_full`, DCP, plain torch or Hugging Face's tools. Collective.

        It may come from any number of ranks, any strategy and any units, from FSDP2, DDP or an unsharded model. Each rank
        reads its own slices. Those of :meth:`save` are verified, all files of them, before anything is changed; what
        torch.distributed.checkpoint has written, without checksums, is read into new memory first.

        Full checkpoints are mapped and compared, and then each rank copies its slices out of them; the whole is never in memory.
        They are torch files (a state dict by itself, in ``{"model": ...}`` or ``{"state_dict": ...}``, with optimizer state by
        number or by name; Lightning's checkpoints, too) or safetensors. Damage within the values goes unnoticed there, as in
        plain torch: the files have no checksums that a part can be verified with.

        Args:
            path: a directory, or a file; every rank must see the same one.
            optimizer: as for :meth:`save`; None leaves optimizers alone.
            dtype: convert floating-point entries to this dtype where the model has it and the checkpoint another one. Without it
                that is an error.
            models: as for :meth:`save`.

        Returns:
            The `extra` that was saved, on every rank; None where there is none.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, files are missing or damaged, or it holds objects that are
                not loaded because unpickling them could run code. Nothing has changed.
            StateDictError: on all ranks, with everything that is missing, unexpected, or of another shape or dtype. Nothing has
                changed.
            UnitStateError: inside a forward or ``engine.gathered()``.
        """
        from .checkpoint import load

        return load(self, path, optimizer, dtype=dtype, models=models)
