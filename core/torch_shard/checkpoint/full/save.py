"""Saving a full checkpoint: gathered a unit at a time, and written by rank 0."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ...comm.collective_steps import broadcast, each
from ...errors import ConfigError
from ...state import model_state
from ..format.atomic_directory import target_of
from ..format.mmap_buffer import buffer
from ..format.safetensors import not_held, size_of
from ..format.torch_file import Slot, check_loadable
from ..mismatches import check_dtype
from ..ports import EnginePort
from ..sharded.entries import EXTRA, MODEL, OPTIMIZER, Optimizers, optimizers_of
from .output import Output, safetensors_output, torch_output
from .stream import ModelStream, OptimizerStream
from .tied_weights import chosen_names


def save_full(
    engine: EnginePort,
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
        target = target_of(path)
        return target, _format_of(target, format, first), size_of(max_shard_size)

    # Only rank 0's path, and what is there, count: other nodes need not have it.
    target, chosen, limit = each(runtime, what, prepare, key=(format, dtype, max_shard_size))
    chosen, nonce = broadcast(runtime, (chosen, secrets.token_hex(8)), what)

    def contents() -> _Contents:
        found = _Contents(engine, optimizers_of(optimizer), extra, dtype)
        if chosen == "safetensors":
            found.refuse_for_safetensors()
        return found

    saved = each(runtime, what, contents, key=lambda found: found.key)
    for stream in saved.optimizers:
        stream.describe(what)
    with contextlib.ExitStack() as stack:
        outputs: list[Output] = []  # one, on rank 0

        def begin() -> torch.Tensor:
            if first:
                is_torch = chosen == "torch"
                opened = (
                    saved.torch_output(target, nonce) if is_torch else saved.safetensors_output(target, nonce, limit)
                )
                outputs.append(stack.enter_context(opened))
            return buffer(max(part.nbytes for part in saved.streams), runtime.collectives.device)

        memory = each(runtime, what, begin, nonce=f"{nonce}/begin")
        step = 0

        def put(values: Callable[[], Iterable[tuple[Slot, torch.Tensor]]]) -> None:
            def write() -> None:
                for output in outputs:
                    for slot, tensor in values():
                        output.write(saved.keys.get(slot, slot), tensor)

            nonlocal step
            step += 1
            each(runtime, what, write, nonce=f"{nonce}/{step}")

        for part in saved.streams:
            part.send(put, what, memory)
        each(runtime, what, outputs[0].commit if first else lambda: None, nonce=f"{nonce}/finish")


def _format_of(path: Path, format: str | None, look: bool) -> str:
    """Return the format, ``"torch"`` or ``"safetensors"``, that was asked for or follows from the path.

    With `look`, a directory that exists at the path counts, too.
    """
    if format not in (None, "torch", "safetensors"):
        raise ConfigError(f"format must be 'torch', 'safetensors' or None, not {format!r}.")
    if format is not None:
        return format
    is_folder = not path.suffix[1:].isalpha() or (look and path.is_dir())  # what "llama-3.1-8b" ends in is no suffix
    return "safetensors" if is_folder or path.suffix == ".safetensors" else "torch"


class _Contents:
    """The contents of a full checkpoint.

    Attributes:
        keys: the names under which safetensors files hold the slots' tensors, by slot.
    """

    def __init__(self, engine: EnginePort, optimizers: Optimizers, extra: Any, dtype: torch.dtype | None) -> None:
        runtime = engine._runtime
        self.module = engine.model
        self.model = ModelStream(engine.model, runtime, dtype)
        self.entries = optimizers
        self.optimizers = [OptimizerStream(engine.model, runtime, o) for _, held in self.entries for o in held]
        self.streams: list[ModelStream | OptimizerStream] = [self.model, *self.optimizers]
        self.extra = extra if runtime.collectives.world_rank == 0 else None
        self.has_extra = extra is not None
        self.key = (self.model.key, [where for where, _ in self.entries], [stream.key for stream in self.optimizers])
        self.keys: dict[Slot, str] = {}

    def refuse_for_safetensors(self) -> None:
        """Raise if there is anything but the model's tensors."""
        if self.optimizers or self.has_extra:
            raise ConfigError(
                "safetensors files hold a model only, no optimizer and no extra. Save these with engine.save, or everything in a "
                'torch file (format="torch").'
            )
        for name, value in self.model.structure.items():
            if not isinstance(value, Slot):
                raise not_held(name, f"hold tensors only, and this is {type(value).__name__}. Leave it out")

    def torch_output(self, target: Path, nonce: str) -> contextlib.AbstractContextManager[Output]:
        """Return the output for a torch file. Call it on rank 0, after the optimizers' describe()."""
        model, states = self.model.structure, [stream.structure for stream in self.optimizers]
        for name, value in model.items():
            if not isinstance(value, Slot):
                check_loadable(value, name)
        check_loadable(list(model), "a name in the state dict")
        # Modules and hooks may add anything to it.
        check_loadable(getattr(model, "_metadata", None), "the state dict's _metadata")
        for state in states:
            check_loadable(state, OPTIMIZER)
        check_loadable(self.extra, EXTRA)
        if not states and self.extra is None:
            return torch_output(target, nonce, model)
        structure: dict[str, Any] = {MODEL: model}
        if states and len(self.entries[0][0]) > 1:
            structure[OPTIMIZER] = {where[-1]: state for (where, _), state in zip(self.entries, states, strict=True)}
        elif states:
            structure[OPTIMIZER] = states if len(states) > 1 else states[0]
        if self.extra is not None:
            structure[EXTRA] = self.extra
        return torch_output(target, nonce, structure)

    def safetensors_output(self, target: Path, nonce: str, limit: int) -> contextlib.AbstractContextManager[Output]:
        """Return the output for safetensors files of at most `limit` bytes. Call it on rank 0."""
        kept = chosen_names(self.module, [names for _, names in self.model.slots])
        entries: dict[str, tuple[torch.Size, torch.dtype]] = {}
        tied: dict[str, str] = {}
        for name, (slot, names) in zip(kept, self.model.slots, strict=True):
            self.keys[slot], entries[name] = name, (slot.shape, slot.dtype)
            tied.update((other, name) for other in names if other != name)
        return safetensors_output(target, nonce, entries, tied, limit)
