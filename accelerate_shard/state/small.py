"""Everything of a checkpoint but models and optimizers, in Accelerate's own files: schedulers, samplers, the scaler, random
states of every rank, custom objects."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from accelerate.checkpointing import load_accelerator_state, save_accelerator_state

from torch_shard.errors import CheckpointError
from torch_shard.log import logger

from .custom import as_cut, file_name
from .files import CUSTOM, SCALER_NAME, SCHEDULER_NAME, numbered, random_states, read

__all__ = ["SmallState", "write"]


def write(accelerator: Any, folder: Path) -> None:
    """Write this rank's random states; on rank 0 schedulers, samplers and the scaler too. Not collective."""
    first = accelerator.is_main_process
    save_accelerator_state(
        str(folder),
        [],
        [],
        accelerator._schedulers,
        accelerator._dataloaders if first else [],  # of which every rank would write the same file
        accelerator.process_index,
        accelerator.step,
        accelerator.scaler if first else None,
    )


class SmallState:
    """The small files of a checkpoint that is about to be loaded: :meth:`check` first, :meth:`apply` when all else fits.

    Args:
        accelerator: whose objects are loaded.
        folder: of the checkpoint.
        weights_only: read with the loader that runs no code.
        load_kwargs: the user's, for ``torch.load``.
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
        """Read everything once. Not collective.

        Raises:
            CheckpointError: files are missing, or can't be read, or are of other custom objects.
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
            read(self.folder / file_name(number), **options) for number in range(len(accelerator._custom_objects))
        ]
        own = self._states.get(accelerator.process_index)
        if own is not None:
            read(self.folder / own, weights_only=True)

    def apply(self) -> int | None:
        """Load all of it. Not collective.

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
            custom.load_state_dict(as_cut(custom, state))
        self._custom = []
        self._tell_of_other_ranks()
        step: int | None = found.get("step")
        return step

    def _tell_of_other_ranks(self) -> None:
        saved, world = len(self._states), self._accelerator.num_processes
        if saved == world or not self._accelerator.is_main_process:
            return
        what = (
            f"those of ranks {world} to {saved - 1} are left out"
            if saved > world
            else f"ranks {saved} to {world - 1} go on with the random states that they have"
        )
        logger.warning(
            "%s was saved by %d ranks and is loaded by %d. Parameters and optimizers are the same; of the random states "
            "(dropout, augmentations) %s, and every rank sees other samples than it would have.",
            self.folder,
            saved,
            world,
            what,
        )
