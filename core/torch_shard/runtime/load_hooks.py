"""Hooks that note loads through torch's own ``load_state_dict``, so that a load on some ranks only is an error."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ..comm.divergence import LOADS

if TYPE_CHECKING:
    from ..unit.unit import Unit
    from .runtime import Runtime


def note_load(runtime: Runtime, unit: Unit, name: str, module: nn.Module, keys: Any) -> None:
    """Add a load into the module called `name` to the sequence that the ranks compare; a post-hook of ``load_state_dict``.

    Each rank copies into its own shards, and no collective would miss a rank. The ranks compare their sequences when the
    next forward begins.
    """
    # Inside engine.gathered one rank may load for all ranks; the values are sent when it ends.
    if not unit.is_summoned:
        runtime.operations.note(zlib.crc32(name.encode()), f"{LOADS}{name or 'the root module'!r}")


def notes_loads(hook: Any) -> bool:
    """Return True for a hook that :func:`note_loads` has registered."""
    return getattr(hook, "func", None) is note_load


def note_loads(runtime: Runtime, unit: Unit, modules: Mapping[str, nn.Module]) -> None:
    """Note loads into `modules`, which hold parameters of `unit`, from now on."""
    for name, module in modules.items():
        if not any(notes_loads(hook) for hook in module._load_state_dict_post_hooks.values()):
            module.register_load_state_dict_post_hook(partial(note_load, runtime, unit, name))
