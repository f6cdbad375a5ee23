"""In-place changes of sharded parameters, for ranks that read alone: changes of unknown values, and edits of known ones."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .tensor import ShardTensor

if TYPE_CHECKING:
    from ..comm.one_sided.partners import ShardPart
    from ..comm.one_sided.versions import Versions

_NOTHING = contextlib.nullcontext()


class Origin(NamedTuple):
    """The origin of a copy of a parameter's shard (see :mod:`torch_shard.comm.one_sided.edits`).

    Attributes:
        unit_ref: weak reference to the parameter's unit.
        name: the parameter's name.
        version, number: the version of the model, and the number of the parameter's values in it.
        copied: the version counter of the copy.
        untraced: the unit's count of forwards that may have changed values without a trace.
    """

    unit_ref: weakref.ref[Any]
    name: str
    version: tuple[int, int, int]
    number: int
    copied: int
    untraced: int


def changing(targets: Sequence[Any], sources: Sequence[Any] = ()) -> contextlib.AbstractContextManager[Any]:
    """Return a context for writing to the shards of parameters among `targets`, as one change for ranks that read alone.

    `sources`: the tensors that are copied into the targets, one for each; empty for any other change.
    """
    # Gradients and optimizer state, the targets of most operations, have no unit.
    found: dict[Versions, list[tuple[ShardTensor, Any]]] = defaultdict(list)
    for target, source in zip(targets, sources or repeat(None)):  # noqa: B905 (one of them may be endless)
        if isinstance(target, ShardTensor) and (unit := target._unit) is not None:
            found[unit.runtime.versions].append((target, source))
    if not found:
        return _NOTHING
    stack = contextlib.ExitStack()
    for versions, pairs in found.items():
        known = sources and versions.tracks_edits and not versions.changing  # a part of another change is no edit
        values = [_values(target, source, versions) for target, source in pairs] if known else [None]
        if any(value is None for value in values):
            stack.enter_context(versions.change())
            versions.edits.touch(pairs[0][0]._spec.name)
        else:
            stack.enter_context(_edit(versions, [target for target, _ in pairs], values))
    return stack


def has_values_of(value: Any, param: ShardTensor) -> bool:
    """Return True if `value` is a copy of `param` of the same dtype, and no change of either was counted since then."""
    if not isinstance(value, ShardTensor) or (unit := param._unit) is None:
        return False
    origin = value._shard_state.copied_from
    same = origin is not None and origin.unit_ref() is unit and origin.name == param._spec.name
    return same and _is_whole(param) and _has_present_version(value)


def is_current_copy(value: ShardTensor) -> bool:
    """Return True if `value` is a copy of a parameter of the same dtype, and neither can have changed since then."""
    origin = value._shard_state.copied_from
    if origin is None or not _has_present_version(value):
        return False
    unit: Any = origin.unit_ref()
    # A change without a trace may be one of another rank's elements.
    if unit.exposed or unit.untraced != origin.untraced:
        return False
    flat, index = unit.find(value)
    return same_bits(value._local, flat.params[index]._local)


def _has_present_version(value: ShardTensor) -> bool:
    origin = value._shard_state.copied_from
    unit = None if origin is None else origin.unit_ref()
    if origin is None or unit is None or origin.copied != value._local._version:
        return False
    versions = unit.runtime.versions
    return bool((origin.version, origin.number) == (versions.present, versions.edits.number(origin.name)))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two shards of one parameter have equal elements, bitwise, so that a NaN equals itself."""
    return torch.equal(a.detach().to(b.device).view(torch.uint8), b.detach().view(torch.uint8))


@contextlib.contextmanager
def _edit(versions: Versions, targets: list[ShardTensor], values: list[Any]) -> Iterator[None]:
    with versions.change(edits=True):
        edits = versions.edits
        edits.begin({target._spec.name: target._local for target in targets})
        yield
        for target, value in zip(targets, values, strict=True):
            if isinstance(value, torch.Tensor):
                edits.put(target._spec.name, value)
            else:
                edits.put_back(target._spec.name, value)


def _values(target: ShardTensor, source: Any, versions: Versions) -> torch.Tensor | int | None:
    """Return the values that a parameter has after `source` is copied into `target`; None if they are not known in full.

    They are a full plain tensor, or the number, in ``versions.edits``, of earlier values that the parameter gets back.
    """
    spec = target._spec
    if not isinstance(source, torch.Tensor) or not _is_whole(target) or spec.part is not None:
        return None
    if not isinstance(source, ShardTensor):
        return source if source.shape == spec.shape else None
    origin = source._shard_state.copied_from
    if origin is None or origin.unit_ref() is not target._unit or origin.copied != source._local._version:
        return None
    return origin.number if (origin.name, origin.version) == (spec.name, versions.present) else None


def remember(copy: ShardTensor, source: Any) -> None:
    """Note that `copy` has just been made of `source`: a parameter, a tensor of an optimizer's ``state_dict()``, or a copy."""
    state, unit = source._shard_state, source._unit
    if copy._local.is_inference():
        return  # without a version counter an edit would not be seen
    if unit is not None and _is_whole(source):
        name, versions = source._spec.name, unit.runtime.versions
        number, ref = versions.edits.number(name), state.unit_ref
        assert ref is not None
        copy._shard_state.copied_from = Origin(ref, name, versions.present, number, copy._local._version, unit.untraced)
    elif (origin := state.copied_from) is not None and origin.copied == source._local._version:
        copy._shard_state.copied_from = origin._replace(copied=copy._local._version)
    elif (named := state.state_of) is not None and (original := named.original(source)) is not None:
        at = named.present(original), copy._local._version
        copy._shard_state.state_of = named._replace(source=weakref.ref(original), at=at)


class StateOf(NamedTuple):
    """The origin of a tensor from an optimizer's ``state_dict()``, or of a copy of one: the optimizer's own state.

    Attributes:
        unit_ref: weak reference to the parameter's unit.
        part: the name by which the other ranks know the state.
        source: weak reference to the state of which the tensor is a copy; None for the state itself.
        at: the version of the state, when the copy was made, and the version counter of the copy.
    """

    unit_ref: weakref.ref[Any]
    part: ShardPart
    source: weakref.ref[ShardTensor] | None = None
    at: tuple[Any, int] = (None, 0)

    def original(self, tensor: ShardTensor) -> ShardTensor | None:
        """Return the optimizer's state, which `tensor`, of this origin, has the values of; None if either has changed since."""
        if self.source is None:
            return tensor
        found = self.source()
        return found if found is not None and (self.present(found), tensor._local._version) == self.at else None

    def present(self, state: ShardTensor) -> Any:
        """Return the present version of `state`, the optimizer's own: that of the parameters, and of edits of the state."""
        unit = self.unit_ref()
        return None if unit is None else (unit.runtime.versions.present, state._local._version)


def _is_whole(param: ShardTensor) -> bool:
    """Return True if `param`, a parameter or an alias of one, is all of the parameter, and no view of a part."""
    unit: Any = param._unit
    flat, index = unit.find(param)
    return flat.params[index]._spec is param._spec
