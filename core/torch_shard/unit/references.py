"""Who refers to the unsharded parameters of a unit beside the engine, and so may compute with them in backward."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..utils.autograd_private import saved_tensors_hooks
from ..utils.pytree import may_hold_tensors, tensors_in

if TYPE_CHECKING:
    from .unit import Unit

_HOLDERS = frozenset({torch.Tensor, list, tuple, dict})
_MODULES_OWN = frozenset(nn.Module().__dict__)


def references_to(unit: Unit, looks_up: bool) -> tuple[bool, list[tuple[int, int, int]], bool]:
    """Find out who refers to the unsharded parameters of `unit` beside the engine.

    Args:
        unit: the unit, which is FULL.
        looks_up: only an embedding has used the parameters, which keeps no other tensors over their memory.

    Returns:
        True if anyone does; the parameters that autograd has saved, as (number of the flat buffer, index, version);
        True if a Python object may hold an unsharded parameter (`self.kept = self.weight`).
    """
    # All ranks must come to the same first answer. Where use counts of memory are not known, the answer is always yes, except for
    # an embedding, where the parameters' own use counts decide. The other two answers concern this rank alone. No count is ever
    # too low; where the baselines may be too high, a Python object may hold any unsharded parameter.
    c = unit.collectives
    by_python = not c.counts_references
    anyone = by_python or not (c.knows_references or looks_up)
    # Under hooks autograd saves what these make of a tensor, and backward may get the parameter itself back from them: a
    # checkpoint recomputes all of its forwards, and refers to their parameters, when backward reaches the first of them.
    anyone |= saved_tensors_hooks(True) is not None
    saved = []
    with torch._C.DisableTorchFunctionSubclass():
        for number, flat in enumerate(unit.flats):
            held, versions, python = flat.references()
            anyone |= held if c.knows_references else bool(versions)
            anyone |= flat.distributed  # DTensor's own collectives may keep references for a while
            by_python |= python
            saved += [(number, i, version) for i, version in versions]
    return anyone, saved, by_python


class KeptTensors:
    """The tensors with a graph that a unit's modules keep in attributes, such as an auxiliary loss."""

    def __init__(self, triggers: list[nn.Module]) -> None:
        """Look into the modules of `triggers`, a list that may still grow."""
        self._triggers = triggers
        self._modules: list[tuple[nn.Module, int]] | None = None  # each with the position of its first own attribute

    def find(self) -> list[torch.Tensor]:
        """Return the tensors with a graph that the modules hold now."""
        if self._modules is None:
            modules = dict.fromkeys(m for trigger in self._triggers for m in trigger.modules())
            self._modules = [(m, _first_attribute(m)) for m in modules]
        found = []
        for module, first in self._modules:
            for value in islice(module.__dict__.values(), first, None):
                if type(value) in _HOLDERS and may_hold_tensors(value):
                    found += [t for t in tensors_in(value) if t.requires_grad and not t.is_leaf]
        return found

    def forget_modules(self) -> None:
        """Look for the modules anew, since one may have been added."""
        self._modules = None


def _first_attribute(module: nn.Module) -> int:
    """Return the position in the module's ``__dict__`` at which attributes begin that are not nn.Module's own."""
    return next((i for i, key in enumerate(module.__dict__) if key not in _MODULES_OWN), len(module.__dict__))
