"""The parts of checkpoints that front ends use: sharded and full ones, their files and folders, and the ranks' common steps."""

from __future__ import annotations

import pickle
import secrets
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..checkpoint import PendingSave, load_contents, save_contents
from ..checkpoint.format.atomic_directory import Saving, check_shared, commit, find, hidden, remove, swap, tidy
from ..checkpoint.format.fileio import make_durable
from ..checkpoint.format.safetensors import size_of
from ..checkpoint.format.torch_file import refused
from ..checkpoint.full.load import FullLoad, by_name
from ..checkpoint.full.open_files import open_full, refuse_damaged
from ..checkpoint.plain_params import all_parameters, plain_source
from ..checkpoint.safe_globals import classes_of_data
from ..checkpoint.sharded.entries import (
    EXTRA,
    EXTRA_SHARDS,
    MODEL,
    MODELS,
    OPTIMIZER,
    Source,
    optimizer_state,
    param_names,
    sources_of,
)
from ..checkpoint.sharded.extra_shards import joined, map_shards, split
from ..checkpoint.sharded.read_tree import Contents, read_contents
from ..comm import collective_steps as phases
from ..comm import consensus
from ..engine import Engine
from ..errors import CheckpointError, ShardError
from ..state import optimizer_state as named_state
from ..state.model_state import Mismatches

__all__ = [
    "EXTRA",
    "EXTRA_SHARDS",
    "MODEL",
    "MODELS",
    "OPTIMIZER",
    "Contents",
    "FullLoad",
    "Mismatches",
    "PendingSave",
    "Saving",
    "Source",
    "all_parameters",
    "broadcast",
    "by_name",
    "check_shared",
    "classes_of_data",
    "commit",
    "each",
    "each_at_length",
    "find",
    "gather",
    "hidden",
    "joined",
    "load_contents",
    "load_optimizer_by_name",
    "make_durable",
    "map_shards",
    "mismatches_by_name",
    "named_parameters_of",
    "open_full",
    "optimizer_state",
    "param_names",
    "parameters_loaded",
    "plain_source",
    "read_contents",
    "read_pickled",
    "refuse_damaged",
    "remove",
    "save_contents",
    "size_of",
    "source_of",
    "sources_of",
    "split",
    "swap",
    "tidy",
]

T = TypeVar("T")


# The first words of pickle's and torch's errors for bytes that are no pickle at all.
_NO_PICKLE = ("Unsupported operand", "nvalid load key", "nvalid magic number", "truncated")


def read_pickled(load: Callable[[], T], path: Any, remedy: str) -> T:
    """Return what `load` reads from the file at `path`; explain its errors by the state of the file. Not collective.

    Args:
        load: a function that reads with ``torch.load``.
        path: the file, for messages.
        remedy: the code by which a user reads a trusted file without torch's safe loader, to be read behind "load it with".

    Raises:
        CheckpointError: the file is damaged or no checkpoint, or holds objects that the safe loader refuses, or whose classes
            are not there.
    """
    try:
        return load()
    except (ShardError, torch.OutOfMemoryError):
        raise
    except AttributeError as error:
        if not str(error).startswith("Can't get attribute"):  # an error in the loader, which may be the user's
            raise
        raise CheckpointError(
            f"{path} holds objects of a class that is not found here, and nothing was loaded ({error}). Define the class where "
            "it was when the file was written."
        ) from error
    except (pickle.UnpicklingError, EOFError, RuntimeError, LookupError) as error:
        text = str(error)
        if text.startswith("Attempting to deserialize"):  # the file is sound; its device is not there
            raise
        is_pickle = zipfile.is_zipfile(path) or not refused(error).startswith(_NO_PICKLE)
        if text.startswith("Weights only load failed") and is_pickle:
            raise CheckpointError(
                f"{path} holds objects that the safe loader does not accept ({refused(error)}). If you trust the file, load it "
                f"with {remedy}, or allow its classes with torch.serialization.add_safe_globals([...])."
            ) from error
        raise CheckpointError(
            f"{path} is damaged, or no checkpoint; nothing was loaded ({type(error).__name__}: {refused(error)})."
        ) from error


# -- the ranks ----------------------------------------------------------------------------------------------------------


def each(engine: Engine, what: str, function: Callable[[], T], nonce: str = "", key: object = None) -> T:
    """Run `function` on every rank; all ranks return, or all raise. See ``comm.collective_steps.each``. Collective."""
    return phases.each(engine._runtime, what, function, nonce, key)


def each_at_length(engine: Engine, what: str, function: Callable[[], T]) -> T:
    """Run `function`, which may take any time, on every rank; all ranks return, or all raise. Collective.

    It raises at once, on all ranks, if a rank does something else.
    """
    consensus.agree(engine._runtime, what)  # the broadcast alone would wait for such a rank
    return each(engine, what, function, broadcast(engine, secrets.token_hex(8), what))


def broadcast(engine: Engine, value: T, what: str) -> T:
    """Return rank 0's object on every rank. Collective."""
    return phases.broadcast(engine._runtime, value, what)


def gather(engine: Engine, value: T, what: str) -> list[T] | None:
    """Return every rank's object, by rank, on rank 0; None elsewhere. Collective."""
    return phases.gather(engine._runtime, value, what)


# -- models and optimizers ----------------------------------------------------------------------------------------------


def named_parameters_of(engines: Sequence[Engine], optimizer: Any) -> nn.Module:
    """Return a module whose parameters' names cover all that an optimizer holds, of any of the engines or of none.

    If all belong to one engine, this is its model. Not collective.
    """
    sources = [Source((), "", engine.model, engine._runtime) for engine in engines]
    known = {id(p) for source in sources for p in source.model.parameters()}
    known.update(id(p) for engine in engines for unit in engine.units for p in unit.params)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    others = {str(number): p for number, p in enumerate(held) if id(p) not in known}
    if len(engines) == 1 and not others:
        return engines[0].model
    return all_parameters([*sources, plain_source("", others)])


def source_of(engine: Engine, path: tuple[str, ...], prefix: str) -> Source:
    """Return the engine's model as a checkpoint describes it: entries at `path`, parameters named with `prefix`."""
    return Source(path, prefix, engine.model, engine._runtime)


def parameters_loaded(engine: Engine) -> None:
    """Forget what was computed with the parameters that a load has replaced. Not collective; call it on all ranks."""
    engine._runtime.parameters_loaded()


def mismatches_by_name(engine: Engine, optimizer: Any, names: dict[int, str], given: Mapping[str, Any]) -> Mismatches:
    """Return the reasons why full state by name does not fit the optimizer. Not collective."""
    return named_state.mismatches(engine._runtime, optimizer, names, given)


def load_optimizer_by_name(engine: Engine, optimizer: Any, names: dict[int, str], given: Mapping[str, Any]) -> None:
    """Load full state by name, which fits; this rank keeps its shards of it. Not collective; call it on all ranks.

    Raises:
        StateDictError: the optimizer's own ``load_state_dict``, or one of the user's hooks of it, failed.
    """
    named_state.load_by_name(engine._runtime, optimizer, names, given)
