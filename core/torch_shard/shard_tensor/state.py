"""What a ShardTensor is beside its metadata: one object, so that all other attributes of the tensor are the user's.

It hangs off the tensor's ``__dict__``, under one name: ``torch.utils.swap_tensors`` exchanges that with the class, and refuses
classes with slots of their own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..offload.pending_writes import Moving
    from .spec import ShardSpec

__all__ = ["OWN_COUNT", "STATE", "ShardState", "is_unreduced"]

STATE = "_shard_state"
"""The attribute of a ShardTensor that is one of these."""
OWN_COUNT = 2
"""As many attributes has a sharded parameter that the user has given none: this one, and torch's ``_is_param``."""


# What few have is not even set on the others: every gradient of every step has one of these objects.
_SELDOM = {"aside": None, "converted": False, "lost": False, "outdated": None, "unreduced": False}


class ShardState:
    """Of one ShardTensor.

    Attributes:
        local: this rank's slice, 1-D. Not there while its memory is written to: whoever asks for it waits.
        spec: which slice of what it is.
        unit_ref: a parameter's unit, by weak reference.
        flat: the 1-D tensor that `local` is a part of, together with others that belong to it; not there while `local` is not.
        origin: of what was computed from a parameter, the unit of that, by weak reference.
        converted: it is another parameter in another dtype or on another device.
        unreduced: a gradient that is this rank's own, while ``no_sync()`` defers its reduction.
        outdated: a gradient that an optimizer has changed on the rank that owns the parameter only: its name, and the version.
        lost: a gradient that lacks what was held for it, since a backward failed.
        moving: what is done to the memory, while `local` is not there.
        aside: `local` and `flat` then.
        home: what is done to the memory, where that is host memory that is worked on in the background, and this is an alias.
    """

    __slots__ = (
        "aside",
        "converted",
        "flat",
        "home",
        "local",
        "lost",
        "moving",
        "origin",
        "outdated",
        "spec",
        "unit_ref",
        "unreduced",
    )

    local: torch.Tensor
    spec: ShardSpec
    unit_ref: weakref.ref[Any] | None
    flat: torch.Tensor | None
    origin: weakref.ref[Any] | None
    converted: bool
    unreduced: bool
    outdated: tuple[str, int] | None
    lost: bool
    moving: Moving | None
    aside: tuple[torch.Tensor, torch.Tensor | None] | None
    home: Moving | None

    def __init__(self, local: torch.Tensor, spec: ShardSpec, unit_ref: weakref.ref[Any] | None = None) -> None:
        self.local = local
        self.spec = spec
        self.unit_ref = unit_ref
        self.flat = self.origin = self.moving = self.home = None

    def __getattr__(self, name: str) -> Any:
        if name in _SELDOM:
            return _SELDOM[name]
        # A slice whose memory is being written is not there to be read; see torch_shard.offload.pending_writes.
        if name in ("local", "flat"):
            moving = self.moving
            if moving is not None:
                moving.settle()
            return object.__getattribute__(self, name)  # also where another thread has waited for it, just now
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_here(self) -> bool:
        """Whether `local` is there. Does not wait."""
        return _has(self, _local)

    def take_away(self, moving: Moving) -> None:
        """Put `local` and `flat` aside until `moving` gives them back."""
        self.aside = self.local, self.flat
        # In this order: another thread finds the one or the other.
        self.moving = moving
        del self.local, self.flat

    def give_back(self) -> None:
        """Undo :meth:`take_away`; what was assigned since then stays."""
        if self.aside is not None:
            local, flat = self.aside
            if not _has(self, _flat):
                self.flat = None if self.is_here else flat
            if not self.is_here:
                self.local = local
        self.moving = self.aside = None

    def marks_of(self, other: ShardState) -> None:
        """Take what is known of a gradient, or a result, from the state of one that this is a copy of."""
        self.origin, self.converted = other.origin, other.converted
        self.unreduced, self.outdated, self.lost = other.unreduced, other.outdated, other.lost


# The slots themselves, past __getattr__.
_local: Any = ShardState.__dict__["local"]
_flat: Any = ShardState.__dict__["flat"]


def _has(state: ShardState, slot: Any) -> bool:
    try:
        slot.__get__(state)
    except AttributeError:
        return False
    return True


def is_unreduced(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient, if it is one of a sharded parameter, is this rank's own."""
    state: ShardState | None = getattr(grad, STATE, None)
    return state is not None and state.unreduced
