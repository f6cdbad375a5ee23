"""The state that the engine keeps on a ShardTensor: one object, so that all other attributes of the tensor are the user's.

The object is in the tensor's ``__dict__``, under one name. A slot would not do: ``torch.utils.swap_tensors`` exchanges the
``__dict__`` with the class, and refuses classes with slots of their own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..offload.pending_writes import PendingWrites
    from .changes import Origin, StateOf
    from .derivation import Derivation
    from .spec import ShardSpec

STATE = "_shard_state"
"""The attribute of a ShardTensor that holds its :class:`ShardState`."""
OWN_ATTRIBUTES = frozenset({STATE, "_is_param", "_place", "data_taken"})
"""Attributes of sharded and unsharded parameters that are not the user's."""


class ShardState:
    """The engine's state of one ShardTensor.

    Attributes:
        local: this rank's shard, 1-D. Unset while its memory is written to in the background; then a read waits.
        spec: the parameter, and this rank's range of it.
        unit_ref: weak reference to the unit of a parameter.
        flat: the 1-D tensor of which `local` is a part, beside other parameters' gradients; unset while `local` is.
        origin: how the tensor was computed from parameters, if it was.
        converted: the tensor is a parameter, converted to another dtype or device.
        copied_from: the parameter whose values the tensor has, if it is a copy; see :mod:`.changes`.
        unreduced: the tensor is a gradient of this rank alone, while ``no_sync()`` defers its reduction.
        mixed: the tensor is such a gradient, or was computed from one, and several ranks hold shards of different
            tensors in its place.
        read_own: returns this rank's own gradient in full while the tensor shows a deferred one; None once it doesn't.
        alias_of: the gradient or optimizer state of which the tensor is an alias.
        outdated: an optimizer's name and the version, if the tensor is a gradient that it has changed on the owning rank only.
        lost: the tensor is a gradient without the part that was deferred, because a backward has failed.
        waits_for: the background work on the memory, while `local` is unset.
        aside: `local` and `flat`, while they are unset.
        pending_writes: the background work on the memory, if the tensor is an alias of host memory.
        state_of: the optimizer's state that the tensor is, if it came with a ``state_dict()``.
        unrecorded: the tensor is an alias or copy of a parameter, and was edited with a value that records gradients.
        is_parameter: the tensor is the parameter itself, and no alias of it.
        aliases: the states of the parameter's aliases, or of those that share the memory of an alias; see :mod:`.aliases`.
    """

    # Every gradient of every step makes an object. Few set these attributes, and class attributes spare the rest the assignments.
    origin: Derivation | None = None
    converted = False
    copied_from: Origin | None = None
    unreduced = False
    mixed = False
    read_own: Callable[[], torch.Tensor | None] | None = None
    alias_of: torch.Tensor | None = None
    outdated: tuple[str, int] | None = None
    lost = False
    waits_for: PendingWrites | None = None
    aside: tuple[torch.Tensor, torch.Tensor | None] | None = None
    pending_writes: PendingWrites | None = None
    state_of: StateOf | None = None
    unrecorded = False
    is_parameter = False
    aliases: weakref.WeakSet[ShardState] | None = None

    def __init__(
        self,
        local: torch.Tensor,
        spec: ShardSpec,
        unit_ref: weakref.ref[Any] | None,
        flat: torch.Tensor | None,
    ) -> None:
        self.local = local
        self.spec = spec
        self.unit_ref = unit_ref
        self.flat = flat

    def __getattr__(self, name: str) -> Any:
        # The memory is written to in the background; see torch_shard.offload.pending_writes.
        if name in ("local", "flat"):
            waits_for = self.waits_for
            if waits_for is not None:
                waits_for.wait()
                if not waits_for:  # the writes have ended without this tensor, which is about to be collected
                    self.give_back()
            return object.__getattribute__(self, name)  # also if another thread has waited and set it just now
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def is_here(self) -> bool:
        """True if `local` is set. Does not wait."""
        return "local" in self.__dict__

    def take_away(self, waits_for: PendingWrites) -> None:
        """Put `local` and `flat` aside until `waits_for` gives them back."""
        self.aside = self.local, self.flat
        # The order matters: another thread must find either `local` or `waits_for`.
        self.waits_for = waits_for
        del self.local, self.flat

    def give_back(self) -> None:
        """Undo :meth:`take_away`; attributes that were assigned since then stay."""
        if self.aside is not None:
            local, flat = self.aside
            if "flat" not in self.__dict__:
                self.flat = None if self.is_here else flat
            if not self.is_here:
                self.local = local
        self.waits_for = self.aside = None

    def copy_marks(self, other: ShardState) -> None:
        """Copy the marks of `other`, the state of the gradient or result of which this tensor is a copy."""
        self.origin = None if other.origin is None else other.origin.forgotten
        self.converted = other.converted
        self.unreduced, self.mixed = other.unreduced, other.mixed
        self.outdated, self.lost = other.outdated, other.lost


def has_user_attributes(param: torch.Tensor) -> bool:
    """Return True if the user has given Python attributes to a sharded parameter."""
    return bool(param.__dict__.keys() - OWN_ATTRIBUTES)


def is_unreduced(grad: torch.Tensor | None) -> bool:
    """Return True if `grad` is a sharded parameter's gradient that is this rank's own, not reduced yet, or a result of one."""
    state: ShardState | None = getattr(grad, STATE, None)
    return state is not None and (state.unreduced or state.mixed)


def is_mixed(tensor: Any) -> bool:
    """Return True if the ranks hold shards of different tensors, see :class:`ShardState`."""
    state: ShardState | None = getattr(tensor, STATE, None)
    return state is not None and state.mixed
