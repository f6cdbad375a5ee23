"""Reading pickled files: with the loader that runs no code from them, unless the user says otherwise."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from torch_shard.frontend.checkpoint import classes_of_data, read_pickled
from torch_shard.log import logger

_UNSAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"  # torch's variable, which counts where a call does not say
_REMEDY = (
    "ShardStrategy(weights_only=False) or Trainer.fit(..., weights_only=False), in Fabric with fabric.load(..., "
    "weights_only=False)"
)


def load_safely(load: Callable[[bool], Any], path: Any, weights_only: bool | None) -> Any:
    """Read something pickled, by default with the loader that runs no code from it.

    Args:
        load: a function that reads it with the ``weights_only`` that it is given.
        path: the file's path, for messages.
        weights_only: the user's choice. None is the safe loader, which then also accepts the harmless classes of which
            hyper-parameters are made; the other one where the variable ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` asks for it, as with
            torch.load.

    Raises:
        CheckpointError: the file holds other classes (the message says how to load a trusted file), or is damaged.
    """
    if weights_only is None and os.environ.get(_UNSAFE, "").lower() in ("1", "y", "yes", "true"):
        weights_only = False
    allowed = _harmless() if weights_only is None else []
    with torch.serialization.safe_globals(allowed):
        return read_pickled(lambda: load(weights_only is not False), path, _REMEDY)


def classes_to_allow(extra: Any) -> list[Any]:
    """Return the classes that the engine must accept in a checkpoint that holds `extra`, beside those that it accepts itself.

    The engine refuses what it could not load again. Here the user can, with ``weights_only=False``; and a hyper-parameter that
    one file would take must not end a run at its first sharded checkpoint.
    """
    file = io.BytesIO()
    torch.save(extra, file)
    file.seek(0)
    with torch.serialization.safe_globals(_harmless()):
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if names:
        logger.warning(
            "the checkpoint holds objects of %s, which the safe loader does not accept: loading it will need "
            "weights_only=False or torch.serialization.add_safe_globals([...])",
            ", ".join(names),
        )
    return [*_harmless(), *filter(None, map(_named, names))]


def _named(full: str) -> Any:
    """Return the class or function of this name; None if it is not imported."""
    parts = full.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for name in parts[cut:] if found is not None else ():
            found = getattr(found, name, None)
        if found is not None:
            return found
    return None


def _harmless() -> list[Any]:
    """Return classes that only hold data, as hyper-parameters use them."""
    found = classes_of_data()
    for module, name in (
        ("lightning.fabric.utilities.data", "AttributeDict"),
        ("lightning_fabric.utilities.data", "AttributeDict"),
        ("omegaconf.base", "ContainerMetadata"),
        ("omegaconf.base", "Metadata"),
        ("omegaconf.nodes", "AnyNode"),
        ("omegaconf.dictconfig", "DictConfig"),
        ("omegaconf.listconfig", "ListConfig"),
    ):
        if module in sys.modules and hasattr(sys.modules[module], name):
            found.append(getattr(sys.modules[module], name))
    if "omegaconf" in sys.modules:
        found.append(Any)  # what a DictConfig's metadata names as its element type
    return found
