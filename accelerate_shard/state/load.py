"""``load_state``: all files are found, read and compared on all ranks before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_shard.errors import CheckpointError, ConfigError, ShardError, StateDictError
from torch_shard.frontend import refuse_inside
from torch_shard.frontend.checkpoint import load_contents

from . import directory_names
from .files import SHARDED, model_file
from .full import FullModel, FullOptimizer, PlainModel
from .hooks import after_load_hooks
from .prepared import Prepared, Ranks, path_of
from .small_objects import SmallState

_WHAT = "Accelerator.load_state"
_Part = FullModel | PlainModel | FullOptimizer


def load_state(accelerator: Any, input_dir: Any, load_kwargs: dict[str, Any] | None, options: dict[str, Any]) -> None:
    """Load a checkpoint. Collective; see :class:`.mixin.StateMixin`."""
    prepared = Prepared(accelerator)
    ranks = Ranks(prepared.sharded, _WHAT)

    def begin() -> tuple[bool, torch.dtype | None]:
        for engine in prepared.sharded:
            refuse_inside(engine, _WHAT)
        return _model_options(options)

    given = None if input_dir is None else str(input_dir)
    strict, dtype = ranks.each(begin, key=lambda found: (given, found, len(prepared.models)))
    ranks.begin()
    ranks.each(accelerator.finish_saving)

    def find() -> SmallState:
        folder = directory_names.source(accelerator, input_dir)
        found = SmallState(accelerator, folder, accelerator.shard_plugin.weights_only, load_kwargs or {})
        found.check()
        return found

    small = ranks.each(find, key=lambda found: (str(found.folder), (found.folder / SHARDED).is_dir()))
    load = _Load(prepared, ranks, small, strict, dtype)
    load.check_files()
    load.left = after_load_hooks(accelerator, ranks, directory_names.as_named(accelerator, input_dir, small.folder))
    load.run()
    step = ranks.broadcast(ranks.each(small.apply))
    if step is not None:
        accelerator.step = step


def _model_options(options: dict[str, Any]) -> tuple[bool, torch.dtype | None]:
    unknown = sorted(set(options) - {"strict", "map_location", "dtype"})
    if unknown:
        raise ConfigError(
            f"load_state: {', '.join(unknown)}: unknown. strict=False accepts missing and unexpected weights, dtype= converts "
            "them."
        )
    dtype = options.get("dtype")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"load_state: dtype must be a floating-point torch.dtype or None, not {dtype!r}.")
    return bool(options.get("strict", True)), dtype


class _Load:
    """The models and optimizers that one ``load_state`` loads, on one rank."""

    def __init__(
        self, prepared: Prepared, ranks: Ranks, small: SmallState, strict: bool, dtype: torch.dtype | None
    ) -> None:
        self.prepared, self.ranks, self.strict, self.dtype = prepared, ranks, strict, dtype
        self.folder, self.weights_only = small.folder, small.weights_only
        self.is_sharded = (self.folder / SHARDED).is_dir()
        self.left: list[int] = []
        self._optimizers: list[_Part] = []

    def check_files(self) -> None:
        """Open the optimizers' files, which are needed whatever models the hooks leave, before hooks run. Collective."""
        if not self.is_sharded or not self.prepared.sharded:
            numbers = range(len(self.prepared.optimizers))
            self._optimizers = self.ranks.each(
                lambda: [FullOptimizer(self.prepared, self.ranks, n, self.folder, self.weights_only) for n in numbers]
            )

    def run(self) -> None:
        """Load the models that hooks have left, and the optimizers. Collective."""
        prepared = self.prepared
        sources, files = [], []
        for position, number in enumerate(self.left):
            if self.is_sharded and prepared.engines[number] is not None:
                sources.append(prepared.source(number, path_of(position)))
            else:
                files.append((position, number))
        parts = self.ranks.each(lambda: self._models(files), key=lambda found: [part.fingerprint for part in found])
        parts += self._optimizers
        self.ranks.each(lambda: _compare(parts))
        if self.is_sharded and prepared.sharded:
            # load_contents compares, too, and raises before it changes anything.
            load_contents(
                prepared.sharded[0],
                self.folder / SHARDED,
                sources,
                {str(number): optimizer for number, optimizer in enumerate(prepared.optimizers)},
                named=prepared.named(),
                strict=self.strict,
                dtype=self.dtype,
            )

        def apply() -> None:
            for part in parts:
                part.apply()

        self.ranks.each(apply)

    def _models(self, files: Sequence[tuple[int, int]]) -> list[_Part]:
        found: list[_Part] = []
        for position, number in files:
            path = model_file(self.folder, position)
            if path is None:
                raise CheckpointError(
                    f"{self.folder} has no weights of model {position}: the checkpoint is incomplete, or of a run with fewer "
                    "models. A hook of save_state that takes weights away needs one of load_state that takes the models."
                )
            engine = self.prepared.engines[number]
            if engine is None:
                found.append(PlainModel(self.prepared.models[number], path, self.strict, self.weights_only))
            else:
                found.append(FullModel(engine, path, self.strict, self.dtype))
        return found


def _compare(parts: Sequence[_Part]) -> None:
    """Raise one error with all that does not fit in any of the files."""
    problems: list[ShardError] = []
    for part in parts:
        try:
            part.compare()
        except ShardError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise StateDictError("\n".join(map(str, problems)))
