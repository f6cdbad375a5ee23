"""The methods of the Accelerator that save and load."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn
from torch.utils._pytree import tree_map

from torch_shard import ShardTensor
from torch_shard.frontend import read_alone
from torch_shard.frontend.checkpoint import PendingSave

from ..settings.plugin import ShardPlugin
from .full import get_state_dict, save_model, shard_in
from .load import load_state
from .prepared import Prepared, Ranks
from .save import save_state

if TYPE_CHECKING:
    _Base: TypeAlias = Any
else:
    _Base = object


def _is_state_dict(obj: Any) -> bool:
    return type(obj) is OrderedDict and hasattr(obj, "_metadata")


def _full(obj: Any, seen: dict[Any, Any]) -> Any:
    """Return `obj` with full tensors in place of sharded ones; for `seen` see :func:`torch_shard.frontend.read_alone`."""

    def replaced(leaf: Any) -> Any:
        if isinstance(leaf, ShardTensor):
            return read_alone(leaf, seen)
        if not _is_state_dict(leaf):
            return leaf
        found: Any = OrderedDict((key, _full(value, seen)) for key, value in leaf.items())
        found._metadata = leaf._metadata  # versions of the modules' own formats, which tree_map would lose
        return found

    return tree_map(replaced, obj, is_leaf=_is_state_dict)


class StateMixin(_Base):  # type: ignore[misc]
    """``get_state_dict``, ``save_model``, ``save_state`` and ``load_state``, for models that are sharded."""

    shard_plugin: ShardPlugin
    _pending_state: PendingSave | None = None

    # -- models -----------------------------------------------------------------------------------------------------
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Mapping[str, Any]:
        """Return the full state dict, plain tensors on the CPU of rank 0; elsewhere it is empty. Collective.

        A rank that calls this alone, while the others do something else, gets the full state dict, too.

        Args:
            model: a model that ``prepare`` has returned, or a part of it. A model that is not sharded gives its own state dict,
                on every rank.
            unwrap: True for the plain model's names; False for those of `model` itself (with ``_orig_mod.`` if it is compiled).

        Raises:
            MissingRankError: some rank has not called this within ``ShardPlugin.timeout`` seconds; the error names that rank.
            UnitStateError: inside a forward.
        """
        found = get_state_dict(model, unwrap)
        if found is None:
            plain: Mapping[str, Any] = super().get_state_dict(model, unwrap=unwrap)
            return plain
        return found

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights, to be loaded with ``load_checkpoint_in_model`` or ``from_pretrained``. Collective.

        It writes what Accelerate writes: ``model.safetensors``, or several files of at most `max_shard_size` with an index, and
        tied weights once. Parameters are gathered a unit at a time; with ``safe_serialization=False`` all of them are in the
        memory of rank 0. Other files in the folder stay, and older weights are replaced when the new ones are complete.

        Raises:
            CheckpointError: on all ranks: the folder can't be written.
            ConfigError: `max_shard_size` is no size.
            MissingRankError: not all ranks have called it.
        """
        save_model(model, save_directory, max_shard_size, safe_serialization, super().save_model)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write `obj` on the main process (of each node), as Accelerate's method does. Not collective.

        Sharded parameters are written in full, and sharded modules as plain ones: the process that writes reads them from the
        others.

        Raises:
            ShardPicklingError: `obj` holds shards of gradients or optimizer state. Only the process that writes raises it,
                before the file is opened.
        """
        if shard_in(obj) is not None:
            each_node = self.project_configuration.save_on_each_node
            if not (self.is_local_main_process if each_node else self.is_main_process):
                return
            obj = _full(obj, {})
        super().save(obj, f, safe_serialization=safe_serialization)

    # -- everything -------------------------------------------------------------------------------------------------
    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Write a checkpoint of everything that was prepared or registered. Collective: call it on all ranks.

        Under ``if accelerator.is_main_process:`` that rank alone writes what it writes under DDP: the ``"full"`` form, with its
        own random states only. It reads the other ranks' shards, which is slower, and holds a model or the state of an optimizer
        on the CPU. State of optimizers that step on full matrices (Muon, Adafactor), or in host memory, can't be read so.

        Hooks, automatic names and ``total_limit`` work as in Accelerate; the oldest checkpoints are deleted when the new one is
        complete. ``ShardPlugin.state_dict_type`` chooses the form (see :mod:`accelerate_shard.state`). The folder appears in one
        step, so that a process that is killed leaves the checkpoint of before. Other files in the folder stay.

        Hooks get the hidden folder in which the checkpoint is being written, and weights as ShardTensors (``"full"``: full, on
        rank 0). They may save models on the main process alone, as under DDP: if there are hooks, all sharded models are gathered
        before, and rank 0's CPU holds them until the last hook has returned. In hooks ``save_pretrained``, ``save_model``,
        ``get_state_dict`` and, on rank 0, the models' ``state_dict()`` have these weights and are not collective. On the other
        ranks they write nothing, and ``get_state_dict`` is empty. ShardTensors among the weights can't be written by themselves;
        use ``get_state_dict``.

        Args:
            output_dir: the folder, on a file system that all ranks share, or a link to one.
            safe_serialization: True to write models as safetensors and not as torch's files, with ``"full"``.
            save_model_func_kwargs: ignored; they are for other engines.

        Returns:
            The folder. With ``ShardPlugin(async_save=True)`` it may not exist yet: the next ``save_state``, ``load_state``,
            ``free_memory`` or ``end_training`` waits for it.

        Raises:
            CheckpointError: on all ranks: the checkpoint can't be written, or the asynchronous save before it has failed. The
                checkpoint of before is as it was.
            ConfigError: neither `output_dir` nor automatic names say where to save.
            DivergenceError: on all ranks: some do something else, and one rank alone can't read an optimizer's state.
            MissingRankError: some rank has not called it.
            StateDictError: hooks have left different weights on different ranks.
        """
        return save_state(self, output_dir, safe_serialization, save_model_func_kwargs)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of either form, or of stock Accelerate under DDP, saved by any number of ranks. Collective.

        Each rank reads its own shards, and the random states of its number; if the checkpoint has fewer, a warning says so.

        Args:
            input_dir: the folder; None for the latest one with automatic names.
            load_kwargs: arguments of ``torch.load`` for all but models; ``{"weights_only": False}`` runs code from the files.
            load_model_func_kwargs: ``strict=False`` accepts missing and unexpected weights; ``dtype`` converts weights that were
                saved in another one; ``map_location`` is ignored: shards are read to where they are.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, or its files are missing, damaged, or could run code. Nothing
                has changed.
            ConfigError: an option is unknown, or neither `input_dir` nor automatic names say what to load.
            StateDictError: on all ranks; lists everything that does not fit. Nothing has changed.
        """
        load_state(self, input_dir, load_kwargs, load_model_func_kwargs)

    def finish_saving(self) -> None:
        """Wait for the last asynchronous ``save_state``, as far as this rank writes it. Not collective.

        Raises:
            CheckpointError: that save has failed; raised once.
        """
        pending, self._pending_state = self._pending_state, None
        if pending is not None:
            pending.wait()

    def _finish_together(self, what: str) -> None:
        if self._pending_state is not None:
            ranks = Ranks(Prepared(self).sharded, what)
            ranks.begin()
            ranks.each(self.finish_saving)

    def end_training(self) -> None:
        """Wait for the last asynchronous checkpoint, and end as Accelerate's method does. Collective after such a save."""
        self._finish_together("Accelerator.end_training")
        super().end_training()

    def free_memory(self, *objects: Any) -> Any:
        """Wait for the last asynchronous checkpoint, and free as Accelerate's method does. Collective after such a save."""
        self._finish_together("Accelerator.free_memory")
        return super().free_memory(*objects)
