"""The files of a checkpoint beside models and optimizers, as Accelerate itself writes them.

They hold the schedulers, the samplers, the scaler, the random states of every rank, and custom objects.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
from accelerate.utils.constants import SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME

from torch_shard import ShardTensor
from torch_shard.errors import CheckpointError
from torch_shard.frontend import is_parameter, map_tensors, shard_like, tensors_of
from torch_shard.frontend.checkpoint import refuse_damaged
from torch_shard.log import logger

from .files import CUSTOM, numbered, random_states, read
from .prepared import Ranks


def write(accelerator: Any, folder: Path) -> None:
    """Write this rank's random states; on rank 0 schedulers, samplers and the scaler too. Not collective."""
    first = accelerator.is_main_process
    save_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders if first else [],  # every rank would write the same file
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler if first else None,
    )


class SmallState:
    """The small files of a checkpoint that is about to be loaded: :meth:`check` first, :meth:`apply` when all else fits.

    Args:
        accelerator: the accelerator whose objects are loaded.
        folder: the checkpoint's folder.
        weights_only: True for the loader that runs no code.
        load_kwargs: the user's arguments for ``torch.load``, which count for more.
    """

    def __init__(self, accelerator: Any, folder: Path, weights_only: bool, load_kwargs: dict[str, Any]) -> None:
        self._accelerator, self.folder = accelerator, folder
        self._options = {**load_kwargs, "weights_only": load_kwargs.get("weights_only", weights_only)}
        self._custom: list[Any] = []
        self._states = random_states(folder)

    @property
    def weights_only(self) -> bool:
        return bool(self._options["weights_only"])

    def check(self) -> None:
        """Read all files, and keep the custom objects' states. Not collective.

        Raises:
            CheckpointError: files are missing or can't be read, or the number of custom objects differs.
        """
        accelerator = self._accelerator
        needed = [numbered(SCHEDULER_NAME, number) for number in range(len(accelerator._schedulers))]
        needed += [SCALER_NAME] if accelerator.scaler is not None else []
        missing = [name for name in needed if not (self.folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.folder} has no {', '.join(missing)}: the checkpoint is incomplete, or of a run with other schedulers or "
                "another mixed_precision."
            )
        for name in needed:
            read(self.folder / name, **self._options)
        custom = [name for name in os.listdir(self.folder) if CUSTOM.fullmatch(name)]
        if len(custom) != len(accelerator._custom_objects):
            raise CheckpointError(
                f"Number of custom checkpoints in folder {self.folder} does not match the number of registered objects: "
                f"{len(custom)} found, {len(accelerator._custom_objects)} registered. Register the same objects as the run that "
                "has saved."
            )
        options = {key: value for key, value in self._options.items() if key != "map_location"}
        self._custom = [
            read(self.folder / _file_name(number), **options) for number in range(len(accelerator._custom_objects))
        ]
        for name in os.listdir(self.folder):
            if name.startswith((SAMPLER_NAME, "dl_state_dict")):
                refuse_damaged(self.folder / name)
        own = self._states.get(accelerator.process_index)
        if own is not None:
            read(self.folder / own, weights_only=True)

    def apply(self) -> int | None:
        """Load all small files. Not collective.

        Returns:
            The Accelerator's count of steps, None on a rank whose random states were not saved.
        """
        accelerator = self._accelerator
        found = load_accelerator_state(
            str(self.folder),
            [],
            [],
            accelerator._schedulers,
            accelerator._dataloaders,
            accelerator.process_index,
            accelerator.scaler,
            "cpu",
            self._options,
        )
        for custom, state in zip(accelerator._custom_objects, self._custom, strict=True):
            custom.load_state_dict(_as_sharded(custom, state))
        self._custom = []
        self._tell_of_other_ranks()
        step: int | None = found.get("step")
        return step

    def _tell_of_other_ranks(self) -> None:
        saved, world = len(self._states), self._accelerator.num_processes
        if saved == world or not self._accelerator.is_main_process:
            return
        what = (
            f"The random states (dropout, augmentations) of ranks {world} to {saved - 1} are left out"
            if saved > world
            else f"Ranks {saved} to {world - 1} go on with the random states (dropout, augmentations) that they have"
        )
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d. Parameters and optimizer state are unaffected. %s, and every "
            "rank sees different samples than on the same number of ranks.",
            self.folder,
            saved,
            world,
            what,
        )


# -- objects given to register_for_checkpointing, whose state may hold shards, such as averages of parameters --------
# The file has full tensors, as without sharding. Loading cuts them into shards like those of the object's present state.


def _file_name(number: int) -> str:
    """Return the file name of the object of this number."""
    return f"custom_checkpoint_{number}.pkl"


def write_custom(ranks: Ranks, objects: list[Any], folder: Path) -> None:
    """Write the objects' states, on rank 0. Collective: ``state_dict`` is called on all ranks.

    Raises:
        ShardError: on all ranks; an object can't be saved, or holds other shards on some ranks; or one rank saves alone, and an
            object holds shards of optimizer state or of an average.
    """
    for number, custom in enumerate(objects):
        state = ranks.each(custom.state_dict, key=lambda found: [t.shape for t in _shards(found)])
        if ranks.alone and not all(map(is_parameter, _shards(state))):
            raise CheckpointError(
                f"{type(custom).__name__}, given to register_for_checkpointing, holds shards that are no parameters, so that one "
                f"rank alone can't read them. Call {ranks.what} on all ranks."
            )
        if _shards(state):
            state = map_tensors(state, lambda t: _full(t, ranks.is_first))
        ranks.on_first(lambda state=state, number=number: _write(state, folder / _file_name(number)))  # type: ignore[misc]


def _shards(state: Any) -> list[ShardTensor]:
    return [tensor for tensor in tensors_of(state) if isinstance(tensor, ShardTensor)]


def _full(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    if not isinstance(tensor, ShardTensor):
        return tensor
    full: torch.Tensor = tensor.full_tensor().detach()
    return full.cpu() if wanted else full[:0].clone()


def _write(state: Any, path: Path) -> None:
    torch.save(state, path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if names:
        logger.warning(
            "%s holds objects of %s, which the safe loader does not accept: load_state will need ShardPlugin(weights_only=False) "
            "or torch.serialization.add_safe_globals([...])",
            path.name,
            ", ".join(names),
        )


def _as_sharded(custom: Any, state: Any) -> Any:
    """Return the saved `state` with shards where the object's present state has some. Not collective."""
    if not any(tensor.dim() for tensor in tensors_of(state)):
        return state
    own = custom.state_dict()
    return _sharded_like(state, own) if _shards(own) else state


def _sharded_like(value: Any, like: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(like, ShardTensor) or isinstance(value, ShardTensor) or value.shape != like.shape:
            return value
        return shard_like(value, like)
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return {key: _sharded_like(child, like.get(key)) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(like, (list, tuple)) and len(value) == len(like):
        return type(value)([_sharded_like(child, other) for child, other in zip(value, like, strict=True)])
    return value
