"""``save_state``: all ranks write under a hidden name, and the checkpoint gets its name in one step."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils.constants import OPTIMIZER_NAME

from torch_shard.errors import CheckpointError, ConfigError
from torch_shard.frontend import all_read, is_readable_alone, reading_alone, refuse_inside
from torch_shard.frontend.checkpoint import (
    OPTIMIZER,
    PendingSave,
    Saving,
    check_shared,
    commit,
    hidden,
    make_durable,
    optimizer_state,
    save_contents,
)
from torch_shard.log import logger

from ..models.full_weights import full_weights
from . import directory_names, full, small_objects
from .files import SHARDED, keep_others, numbered, weights_name
from .hooks import Left, after_save_hooks
from .prepared import OneRank, Prepared, Ranks, path_of

_WHAT = "Accelerator.save_state"


def save_state(accelerator: Any, output_dir: Any, safe_serialization: bool, options: Mapping[str, Any]) -> Path:
    """Write a checkpoint. Collective, unless the main process calls it alone; see :class:`.mixin.StateMixin`."""
    prepared = Prepared(accelerator)
    engines = prepared.sharded
    if not engines or all_read(engines[0], _WHAT, alone=_is_readable_alone(prepared)):
        is_full = accelerator.shard_plugin.state_dict_type == "full"
        return _save(accelerator, prepared, Ranks(engines, _WHAT), output_dir, safe_serialization, options, is_full)
    if not accelerator.is_main_process:  # the main process writes models and optimizers under DDP, too
        logger.warning(
            "rank %d called save_state alone, where the main process writes: nothing is saved.", engines[0].rank
        )
        return directory_names.target(accelerator, output_dir)
    with reading_alone(engines, _WHAT):
        return _save(accelerator, prepared, OneRank(_WHAT), output_dir, safe_serialization, options, True)


def _is_readable_alone(prepared: Prepared) -> bool:
    """Return True if one rank can read from the others all that it writes; it is the same on all ranks. Not collective."""
    found = [(prepared.engine_for(optimizer), optimizer) for optimizer in prepared.optimizers]
    return all(is_readable_alone(engine, optimizer) for engine, optimizer in found if engine is not None)


def _save(
    accelerator: Any,
    prepared: Prepared,
    ranks: Ranks,
    output_dir: Any,
    safe_serialization: bool,
    options: Mapping[str, Any],
    is_full: bool,
) -> Path:
    def begin() -> Path:
        _refuse(accelerator, options)
        for engine in prepared.sharded:
            refuse_inside(engine, _WHAT)
        return directory_names.target(accelerator, output_dir)

    def compared(path: Path) -> tuple[object, ...]:
        # Automatic names are counted on each rank, and the main process may have saved some alone.
        named = path.parent if project.automatic_checkpoint_naming else path
        return str(named), is_full, safe_serialization, len(prepared.models)

    project = accelerator.project_configuration
    # This comes before waiting for an earlier save, so that a missing rank is found here.
    target = ranks.each(begin, key=compared)
    nonce = ranks.begin()
    ranks.each(accelerator.finish_saving)
    target, place, number = ranks.broadcast((target, directory_names.followed(target), project.iteration))
    save = _Writing(accelerator, prepared, ranks, place, nonce, bool(safe_serialization))
    try:
        ranks.on_first(save.make_folder)
        ranks.each(lambda: check_shared(save.beside, ranks.rank))
        save.write_full() if is_full else save.write_sharded()
    except BaseException:
        save.remove()
        raise
    project.iteration = number + 1
    return target


def _refuse(accelerator: Any, options: Mapping[str, Any]) -> None:
    if options and accelerator.is_main_process:
        logger.warning("save_state: %s: without a meaning for sharded models", ", ".join(sorted(options)))
    # The launcher says how many processes there are on this node.
    here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    if accelerator.project_configuration.save_on_each_node and accelerator.num_processes > here:
        raise ConfigError(
            "save_on_each_node: one checkpoint is written by all ranks, to a file system that all nodes share. Leave it out."
        )


class _Writing:
    """One save on one rank."""

    def __init__(
        self, accelerator: Any, prepared: Prepared, ranks: Ranks, target: Path, nonce: str, safe: bool
    ) -> None:
        self.accelerator, self.prepared, self.ranks = accelerator, prepared, ranks
        self.target, self.nonce, self.safe = target, nonce, safe
        self.beside = hidden(target, nonce)
        self.saving: Saving | None = None

    # -- before and after -----------------------------------------------------------------------------------------------
    def make_folder(self) -> None:
        """Make the hidden folder. For rank 0."""
        self.saving = Saving.begin(self.target, self.nonce, _refuse_file, directory_names.siblings(self.accelerator))

    def put_in_place(self) -> None:
        """Give the checkpoint its name; then delete the one before, and those beyond ``total_limit``. For rank 0."""
        assert self.saving is not None
        for path in self.beside.iterdir():
            if path.is_file():
                make_durable(path)
        commit(self.saving, self.target, keep_others)
        self.saving.close()
        directory_names.prune(self.accelerator, self.target)

    def remove(self) -> None:
        """Delete what was written. Does nothing but on rank 0."""
        if self.saving is not None:
            self.saving.close()

    def _write_small(self) -> None:
        self.ranks.each(lambda: small_objects.write(self.accelerator, self.beside))
        small_objects.write_custom(self.ranks, self.accelerator._custom_objects, self.beside)

    # -- the sharded form -----------------------------------------------------------------------------------------------
    def write_sharded(self) -> None:
        """Write models and optimizers to a folder to which all ranks write. Collective."""
        states = self.ranks.each(self._sharded_states)
        with self._full_for_hooks():
            left = after_save_hooks(self.accelerator, self.ranks, states, self.beside, everywhere=True)
        self._write_small()
        contents: dict[str, Any] = {}
        described = []
        for position, item in enumerate(left):
            engine = self.prepared.engines[item.number] if item.number is not None else None
            if item.number is not None and engine is None:
                self._write_model(position, item)
                continue
            path = path_of(position)
            if item.number is not None:
                described.append(self.prepared.source(item.number, path))
            holder = contents if len(path) == 1 else contents.setdefault(path[0], {})
            holder[path[-1]] = item.state
        contents.update(self.ranks.each(self._optimizers))
        engines = self.prepared.sharded
        if not contents or not engines:
            self.ranks.on_first(self.put_in_place)
            return
        asynchronous = self.accelerator.shard_plugin.async_save
        pending = save_contents(
            engines[0],
            self.beside / SHARDED,
            contents,
            sources=described or [self.prepared.source(self.prepared.engines.index(engines[0]))],
            asynchronous=asynchronous,
        )
        if pending is None:
            self.ranks.on_first(self.put_in_place)
        else:
            finish = functools.partial(self._finish, pending)
            self.accelerator._pending_state = PendingSave(self.target, finish, contextlib.nullcontext())
            self.accelerator._pending_state.begin()

    def _finish(self, engines_own: PendingSave) -> CheckpointError | None:
        """Wait for the engine's save, then put the checkpoint in its place; return what went wrong. Not collective."""
        try:
            engines_own.wait()
            if engines_own.failure is not None:  # someone else has waited, and got the error
                raise CheckpointError(engines_own.failure)
            if self.ranks.is_first:
                self.put_in_place()
            return None
        except CheckpointError as problem:
            error = problem
        except Exception as problem:
            error = CheckpointError(
                f"the asynchronous save to {self.target} failed: {problem}. What was at that path before is there still."
            )
            error.__cause__ = problem
        self.remove()
        return error

    def _sharded_states(self) -> list[Mapping[str, Any]]:
        return [
            model.state_dict() if engine is None else engine.state_dict(form="sharded", offload_to_cpu=False)
            for model, engine in zip(self.prepared.models, self.prepared.engines, strict=True)
        ]

    def _optimizers(self) -> dict[str, Any]:
        if not self.prepared.sharded:  # optimizers are written as in the full form
            for number, optimizer in enumerate(self.prepared.optimizers if self.ranks.is_first else ()):
                torch.save(optimizer.state_dict(), self.beside / numbered(OPTIMIZER_NAME, number))
            return {}
        named = self.prepared.named()
        states = {str(n): optimizer_state(named, [own]) for n, own in enumerate(self.prepared.optimizers)}
        return {OPTIMIZER: states} if states else {}

    # -- the full form --------------------------------------------------------------------------------------------------
    def write_full(self) -> None:
        """Write models and optimizers to the files of stock Accelerate, on rank 0. Collective."""
        if self.accelerator._save_model_state_pre_hook:
            with self._full_for_hooks() as full_states:
                states: list[Mapping[str, Any]] = [
                    model.state_dict() if full is None else full
                    for model, full in zip(self.prepared.models, full_states, strict=True)
                ]
                left = after_save_hooks(self.accelerator, self.ranks, states, self.beside, everywhere=False)
            del full_states
            for position, item in enumerate(left):
                self._write_model(position, item)
            del states, left
        else:
            for number, engine in enumerate(self.prepared.engines):
                if engine is not None and self.safe and not self.ranks.alone:
                    engine.save_full(self.beside / weights_name(number, True))  # a unit at a time
                else:
                    self._write_model(number, Left(number, self._full_state(number)))
        for number, optimizer in enumerate(self.prepared.optimizers):
            state = full.optimizer_state(self.prepared, optimizer)
            path = self.beside / numbered(OPTIMIZER_NAME, number)
            self.ranks.on_first(functools.partial(torch.save, state, path))
            del state
        self._write_small()
        self.ranks.on_first(self.put_in_place)

    def _full_for_hooks(self) -> contextlib.AbstractContextManager[list[dict[str, Any] | None]]:
        """Gather full models on rank 0 for hooks that run inside; without hooks gather nothing. Collective."""
        if not self.accelerator._save_model_state_pre_hook:
            return contextlib.nullcontext([])
        return full_weights(self.prepared.models, self.prepared.engines, self.ranks.is_first)

    def _full_state(self, number: int) -> dict[str, Any]:
        engine = self.prepared.engines[number]
        if engine is None:
            found: dict[str, Any] = self.prepared.models[number].state_dict()
            return found
        return engine.state_dict(rank0_only=True, offload_to_cpu=True)

    def _write_model(self, position: int, item: Left) -> None:
        """Write full weights, on rank 0, to the file of their position in the list. Collective."""
        path = self.beside / weights_name(position, self.safe)
        state = collections.OrderedDict(item.state)  # as Module.state_dict() returns it; safe loaders know this type
        if hasattr(item.state, "_metadata"):
            state._metadata = item.state._metadata  # type: ignore[attr-defined]
        self.ranks.on_first(lambda: accelerate.utils.save(state, str(path), safe_serialization=self.safe))


def _refuse_file(target: Path) -> None:
    if os.path.lexists(target) and not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a directory. Give another path, or delete it.")
