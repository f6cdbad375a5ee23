"""What the Trainer's strategy does in saving and loading: which form is written or read, and when older ones are deleted.

The forms themselves are in :mod:`.full` (one file) and :mod:`.sharded` (a folder).
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_shard import Engine
from torch_shard.errors import CheckpointError, ConfigError, StateDictError
from torch_shard.frontend import agree, refuse_inside
from torch_shard.log import logger

from . import extra_shards as _extra
from . import files as _files
from . import full as _full
from . import sharded as _sharded
from .hyper_parameters import with_plain_modules
from .save import SavingMixin, existing


class CheckpointMixin(SavingMixin):
    """The part of a strategy that saves and loads."""

    _weights_only_asked: bool | None
    _failed: bool
    _prepared: bool  # the run's module is sharded
    _pending: Any  # the save that runs in the background
    _pending_occasion: tuple[Path, Any] | None  # the path and the step of that save
    _shared: Counter[Path]  # by path, the number of callbacks beyond the first that have saved there
    _files_given: int  # the number of single files that rank 0 has handed to the plugin
    _shown_to: list[Any]  # callbacks that ask us which names are taken
    _removals: list[tuple[Any, int]]  # on rank 0: older checkpoints to delete, each with `_files_given` at that time

    # -- a checkpoint is restored -------------------------------------------------------------------------------------
    # Lightning's restore_checkpoint_after_setup (False) and lightning_restore_optimizer (True) are right: as with DDP, hooks
    # see a checkpoint before set-up, and optimizers are configured after it. The module is sharded when its state is about to be
    # loaded (load_model_state_dict), and optimizer states go through load_optimizer_state_dict.

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any form, with torch's safe loader unless the user asked otherwise. Collective.

        Each rank reads its own shards of a folder into ShardTensors. A file is mapped, and its tensors view it. Model and
        optimizer states are loaded later, from what is returned, so that edits in ``on_load_checkpoint`` count.

        Raises:
            CheckpointError: on all ranks, if there is no checkpoint, or it is damaged, of an unknown form, or holds objects that
                the safe loader refuses.
        """
        for asked in (self._weights_only_asked, self._settings.weights_only):
            weights_only = asked if weights_only is None else weights_only
        self._finish_save()
        # All ranks read the same one, also if the path holds a time or a version.
        path = self._from_rank0(checkpoint_path, "loading a checkpoint")
        path = self._run_on_all(lambda: existing(path))
        if _files.is_local(path) and Path(path).is_dir():
            self._shard_to_load()
            engine = self.engine_or_none
            if engine is None:
                raise CheckpointError(
                    f"{path} is a sharded checkpoint, which is read while a module is sharded: pass it as ckpt_path to "
                    "fit, validate, test or predict, or consolidate it to one file."
                )
            fitting = self.lightning_module.trainer.state.fn == self._private.TrainerFn.FITTING
            return _sharded.read_folder(engine, Path(path), fitting, weights_only, self._private.version)
        share = self.global_rank, self.world_size
        io, maps = self.checkpoint_io, self._maps()
        return self._run_on_all(lambda: _full.read_file(path, io, maps, weights_only, share))

    def _shard_to_load(self) -> None:
        """Shard the module before a run restores its checkpoint, so that it restores shards. Collective."""
        module = self.lightning_module
        if not self._prepared and module is not None and module._trainer is not None and dist.is_initialized():
            self._prepare(module.trainer)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the model's state, of either form. Collective."""
        self._shard_to_load()
        engine = self.engine_or_none
        if engine is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            _full.load_model(engine, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimizer states of either form, written on any number of ranks. Collective."""
        engine = self.engine_or_none
        states = checkpoint["optimizer_states"]
        if isinstance(states, _sharded.UnreadStates):
            assert engine is not None
            states = states.read(engine, [self._unwrapped(optimizer) for optimizer in self.optimizers])
        if states and len(states) != len(self.optimizers):
            raise StateDictError(
                f"rank {self.global_rank}: the checkpoint has {len(states)} optimizers, configure_optimizers gives "
                f"{len(self.optimizers)}. Give those that were saved, or edit checkpoint['optimizer_states'] in "
                "on_load_checkpoint; an empty list starts them anew."
            )
        for optimizer, state in zip(map(self._unwrapped, self.optimizers), states, strict=False):
            if engine is None:
                optimizer.load_state_dict(copy.deepcopy(state))
            else:
                _sharded.load_optimizer(engine, optimizer, state, engine.model)

    # -- a checkpoint is written --------------------------------------------------------------------------------------
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict for a checkpoint of either form. Collective for the full form.

        See :func:`.full.model_state` and :func:`.sharded.model_state`.
        """
        engine = self.engine_or_none
        if engine is None:
            return super().lightning_module_state_dict()
        refuse_inside(engine, "saving a checkpoint")
        if self._settings.state_dict_type == "sharded":
            return _sharded.model_state(engine)
        return _full.model_state(engine)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the state of one optimizer for a checkpoint of either form. Collective for the full form.

        See :func:`.full.optimizer_state` and :func:`.sharded.optimizer_state`.
        """
        optimizer = self._unwrapped(optimizer)
        engine = self.engine_or_none
        if engine is None:
            return super().optimizer_state(optimizer)
        if self._settings.state_dict_type == "sharded":
            return _sharded.optimizer_state(engine, optimizer)
        return _full.optimizer_state(engine, optimizer, engine.model)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file by rank 0, or a folder by all ranks. Collective; a failure is raised on all ranks.

        A run that has ended and given the plain module back leaves nothing sharded: then it is one file in any case.
        """
        engine = self.engine_or_none
        state = checkpoint.get("state_dict")
        names = list(state) if isinstance(state, Mapping) else []
        if engine is not None:
            full = self._settings.state_dict_type == "full"
            checkpoint = _extra.gather_shards(engine, checkpoint) if full else checkpoint
            key = self.lightning_module.CHECKPOINT_HYPER_PARAMS_KEY
            checkpoint = with_plain_modules(engine, checkpoint, key, checkpoint.get("state_dict", {}) if full else {})
        filepath, of_first = self._from_rank0((filepath, names), "trainer.save_checkpoint")
        if self._settings.state_dict_type == "sharded" and engine is not None:
            if storage_options is not None:
                raise ConfigError(
                    "storage_options is for plugins, which write single files; this checkpoint is a folder."
                )
            self._run_on_all(lambda: _sharded.check_names(engine.rank, names, of_first))
            agree(engine, "saving a checkpoint", _extra.shard_names(checkpoint))
            self._save_folder(engine, checkpoint, _sharded.local_path(filepath))
        else:
            self._finish_save()
            if self._settings.state_dict_type == "sharded":
                logger.info("%s becomes one file: the module is plain after the run", filepath)
            self._run_on_rank0(
                f"write the checkpoint {filepath}", lambda: self._save_file(checkpoint, filepath, storage_options)
            )

    def _save_file(self, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
        self._write_file(checkpoint, path, storage_options)
        self._files_given += 1
        self._keep(path)
        self._remove_replaced()

    def _save_folder(self, engine: Engine, checkpoint: dict[str, Any], target: Path) -> None:
        occasion = (target, checkpoint.get("global_step"))
        if self._pending is not None and occasion == self._pending_occasion:
            # A second callback with enable_version_counter=False has chosen the same name.
            self._shared[target] += 1
        self._finish_save()
        contents = _sharded.contents_of(checkpoint)
        self._pending = self._write_folder(engine, contents, target, self._settings.async_save and not self._links())
        self._pending_occasion = occasion
        self._keep(target)

    def _links(self) -> bool:
        """Return True if a callback links to each checkpoint at once, so that it must be complete: no save in the background."""
        return any(getattr(callback, "save_last", None) == "link" for callback in self._of_trainer("callbacks"))

    def _of_trainer(self, what: str) -> list[Any]:
        """Return the Trainer's callbacks or loggers; none without a Trainer."""
        module = self.lightning_module
        return [] if module is None or module._trainer is None else getattr(module.trainer, what)

    # -- names that ModelCheckpoint may take --------------------------------------------------------------------------
    def _show_pending(self, callbacks: list[Any]) -> None:
        """Make each ModelCheckpoint choose the names that it would choose without a save in the background."""
        for callback in callbacks if self._settings.async_save else ():
            if isinstance(callback, self._private.ModelCheckpoint) and "file_exists" not in vars(callback):
                callback.file_exists = functools.partial(self._will_exist, callback.file_exists)
                self._shown_to.append(callback)

    def _hide_pending(self) -> None:
        while self._shown_to:
            vars(self._shown_to.pop()).pop("file_exists", None)

    def _will_exist(self, on_disk: Callable[[Any, Any], bool], filepath: Any, trainer: Any) -> bool:
        """Return True if there will be a checkpoint at `filepath` when the save in the background has ended. Collective."""
        found = on_disk(filepath, trainer)
        if self._pending is None:
            return found
        target, removed = os.path.abspath(filepath), [os.path.abspath(path) for path, _ in self._removals]
        if target in removed:
            found = False
        elif self._pending_occasion is not None and target == str(self._pending_occasion[0]):
            found = True
        return bool(self.broadcast(found))  # rank 0 knows what is deleted

    def remove_checkpoint(self, filepath: Any) -> None:
        """Delete a checkpoint; while a newer one is written in the background, wait until that is complete."""
        if not self.is_global_zero:
            return
        target = Path(filepath).absolute() if _files.is_local(filepath) else None
        if target is not None and self._shared[target]:
            self._shared[target] -= 1  # another callback still has it
        else:
            self._removals.append((filepath, self._files_given))
            if self._pending is None:
                self._remove_replaced()

    # -- older saves --------------------------------------------------------------------------------------------------
    def _finish_save(self) -> None:
        """Wait for the save in the background, then delete what had to stay until then. Collective where there is one.

        Raises:
            CheckpointError: on all ranks, if the save has failed and the engine has not raised that before. The older checkpoints
                are kept in both cases.
        """
        pending = self._pending
        if pending is not None:
            try:
                pending.wait()
            finally:
                if pending.done():  # else the wait was interrupted, and teardown waits again
                    self._pending = None
                    self._removals = [] if pending.failure is not None else self._removals
        self._remove_replaced()

    def _remove_replaced(self) -> None:
        """Delete the older checkpoints, except those that a plugin which writes in the background has not replaced yet."""
        base, waiting = self._plugins()[-1], []
        for path, given in self._removals:
            if isinstance(base, _files.FileMixin) and base.written < given:
                waiting.append((path, given))
                continue
            try:
                if _files.is_local(path) and (Path(path).is_dir() or Path(path).is_symlink()):
                    _files.remove(Path(path).absolute())
                else:
                    self.checkpoint_io.remove_checkpoint(path)
            except OSError as error:  # rank 0 alone knows; this is no reason to end a run
                logger.warning("the older checkpoint %s could not be deleted: %s", path, error)
        self._removals = waiting

    def _keep(self, path: Any) -> None:
        """Take a path off the removals, because it has been saved again."""
        self._removals = [(other, given) for other, given in self._removals if str(other) != str(path)]

    def _finish_saves_at_end(self) -> Exception | None:
        """Wait for everything that is being written, and return what went wrong, the same on all ranks. Collective."""
        error: Exception | None = None
        for step in (self._finish_save, self.checkpoint_io.teardown, self._remove_replaced):
            try:
                step()
            except Exception as problem:
                error = error or problem
        # A user's plugin may fail on rank 0 alone. After a failed run the other ranks may be anywhere.
        if not self._failed and not isinstance(self.checkpoint_io, _files.FileMixin):
            told = self.broadcast(None if error is None else f"{type(error).__name__}: {error}")
            if told is not None and error is None:
                error = CheckpointError(f"rank 0 could not write a checkpoint: {told}")
        return error
