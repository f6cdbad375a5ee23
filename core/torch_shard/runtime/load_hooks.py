"""Hooks that note loads through torch's own ``load_state_dict``, so that a load on some ranks only is an error."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..comm.divergence import LOADS
from .registry import runtime_of

if TYPE_CHECKING:
    from ..unit.unit import Unit


class NoteLoad:
    """A post-hook of ``load_state_dict`` that adds the load to the sequence that the ranks compare.

    Each rank copies into its own shards, and no collective would miss a rank. The ranks compare their sequences when the
    next forward begins.
    """

    def __init__(self, unit: Unit, name: str) -> None:
        self.unit, self.name = unit, name

    def __call__(self, module: nn.Module, keys: Any) -> None:
        operations = runtime_of(self.unit).operations
        # Inside engine.gathered one rank may load for all ranks; the values are sent when it ends.
        if operations is not None and not self.unit.is_summoned:
            operations.note(zlib.crc32(self.name.encode()), f"{LOADS}{self.name or 'the root module'!r}")


def note_loads(unit: Unit, modules: Mapping[str, nn.Module]) -> None:
    """Have loads into `modules`, which hold parameters of `unit`, noted."""
    for name, module in modules.items():
        if not any(isinstance(hook, NoteLoad) for hook in module._load_state_dict_post_hooks.values()):
            module.register_load_state_dict_post_hook(NoteLoad(unit, name))


def forget_loads(root: nn.Module) -> None:
    """Remove the hooks of :func:`note_loads`."""
    for module in root.modules():
        hooks = module._load_state_dict_post_hooks
        for key in [k for k, hook in hooks.items() if isinstance(hook, NoteLoad)]:
            del hooks[key]
