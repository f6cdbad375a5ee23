"""How a tensor was computed from parameters, by which one rank alone can compute its full values.

A function of parameters that works element by element (``p.abs()``, ``p.float()``, ``p * 2``) runs on shards, and returns a
ShardTensor without a unit. All ranks together gather such a tensor. One rank alone can't, because the others may never have
computed it: it computes the tensor anew from the full parameters, which it reads (:mod:`torch_shard.comm.one_sided`).
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .changes import is_current_copy
from .full_tensor import full_tensors
from .function_call import FunctionCall, recipe_of
from .function_sets import LISTS
from .tensor import ShardTensor

if TYPE_CHECKING:
    from .ports import UnitPort

Read = Callable[[ShardTensor], torch.Tensor]

# A derivation keeps its operands alive, so that a chain of more calls than this is dropped.
_MOST_CALLS = 16


class Derivation:
    """How one ShardTensor was computed from parameters.

    Attributes:
        unit_ref: weak reference to the unit of one of the parameters.
        call: the function and its operands; None if the tensor can't be computed anew.
        calls: the number of calls in the longest chain from a parameter to the tensor.
    """

    __slots__ = ("_model", "_recipe", "_versions", "call", "calls", "unit_ref")

    def __init__(self, unit_ref: weakref.ref[Any], call: FunctionCall | None = None) -> None:
        self.unit_ref, self.call, self.calls = unit_ref, call, 1
        self._model: Any = None
        self._recipe: int | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []  # operands and result, and their version counters

    @property
    def forgotten(self) -> Derivation:
        """The same without the call, for a copy of the tensor that may be edited by itself."""
        return Derivation(self.unit_ref)

    def keep(self, result: ShardTensor) -> None:
        """Keep the operands of `call`, which has made `result`, if its values can be computed anew from them."""
        assert self.call is not None
        origins = [t._shard_state.origin for t in self.call.sharded if t._unit_ref is None]
        self.calls += max((origin.calls for origin in origins if origin is not None), default=0)
        self._model = self._version_of_model()
        local = [t._local if isinstance(t, ShardTensor) else t for t in (*self.call.tensors, result)]
        # Without a version counter an edit would not be seen.
        known = all(origin is not None and origin.is_current for origin in origins)
        if self.calls > _MOST_CALLS or not known or any(t.is_inference() for t in local):
            self.call = None
            return
        self._versions = [(t, t._version) for t in local]

    @property
    def recipe(self) -> int:
        """See :attr:`.FunctionCall.recipe`; 0 if the call is not known."""
        if self._recipe is None:  # cached, since the chain of calls may be long
            self._recipe = 0 if self.call is None else self.call.recipe
        return self._recipe

    @property
    def is_current(self) -> bool:
        """True if neither the operands nor the result were edited since the call."""
        return (
            self.call is not None
            and self._model == self._version_of_model()
            and all(tensor._version == version for tensor, version in self._versions)
        )

    def _version_of_model(self) -> tuple[int, ...] | None:
        unit = self.unit_ref()
        if unit is None:
            return None
        versions = unit.runtime.versions
        return *versions.present, versions.edits.digest, sum(unit.untraced for unit in unit.runtime.units)


def note(call: FunctionCall, results: Iterable[Any], operands: Iterable[list[Any]]) -> None:
    """Note on new ShardTensors that `call` has computed them from parameters, if from nothing else that is sharded.

    Args:
        call: the call.
        results: the call's results; several for a function of lists.
        operands: the tensors that were combined for each result.
    """
    for position, (new, combined) in enumerate(zip(results, operands, strict=False)):
        if not isinstance(new, ShardTensor) or new._unit_ref is not None or any(new is t for t in combined):
            continue
        units = [_unit_ref(t) for t in combined if isinstance(t, ShardTensor)]
        # With a gradient or optimizer state among the operands, the result is an update.
        if not units or None in units:
            continue
        origin = Derivation(units[0], call.at(position) if call.name in LISTS else call)  # type: ignore[arg-type]
        origin.keep(new)
        new._shard_state.origin = origin


def _unit_ref(t: ShardTensor) -> weakref.ref[Any] | None:
    state = t._shard_state
    return state.unit_ref if state.origin is None else state.origin.unit_ref


def unit_of_origin(tensor: ShardTensor) -> UnitPort | None:
    """Return the unit of a parameter, or of one of which the tensor is a copy or was computed; None for other tensors."""
    ref, copied_from = _unit_ref(tensor), tensor._shard_state.copied_from
    if ref is None and copied_from is not None:
        ref = copied_from.unit_ref
    return None if ref is None else ref()


@contextlib.contextmanager
def reading(
    tensors: Iterable[Any], what: str, recording: bool, call: FunctionCall | None = None
) -> Iterator[Read | None]:
    """Return a context that yields a function by which this rank alone reads full parameters; None where all ranks read.

    Collective, unless this rank reads alone.

    Args:
        tensors: parameters, and tensors that were computed from some, whose full values will be wanted.
        what: the operation, for messages; the same on all ranks.
        recording: the result may be part of a graph.
        call: the function of the tensors that is computed; None if the tensors themselves are wanted.

    Raises:
        DivergenceError: this rank is alone, and can't compute one of the tensors anew.
    """
    sharded = [t for t in tensors if isinstance(t, ShardTensor)]
    unit = next((unit for t in sharded if (unit := unit_of_origin(t)) is not None), None)
    if unit is None or any(t._spec.part is not None for t in sharded):
        yield None
        return
    known = all(_is_known(t, unit) for t in sharded)
    recipe = zlib.crc32(repr(recipe_of(sharded)).encode()) if call is None else call.recipe
    with unit.runtime.on_demand.alone(unit, what, recipe, recording, known) as read:
        yield read


def _is_known(tensor: ShardTensor, unit: UnitPort) -> bool:
    """Return True if :func:`full_values` can compute the tensor's values from parameters of the model of `unit`."""
    if tensor._unit_ref is not None:
        own = tensor._unit
        return own is not None and own.runtime is unit.runtime
    if (copied_from := tensor._shard_state.copied_from) is not None:
        own = copied_from.unit_ref()
        return own is not None and own.runtime is unit.runtime and is_current_copy(tensor)
    origin = tensor._shard_state.origin
    if origin is None or origin.call is None or not origin.is_current:
        return False
    return all(_is_known(t, unit) for t in origin.call.sharded)


def full_values(tensor: ShardTensor, read: Read) -> torch.Tensor:
    """Return the full values of a parameter, or of a tensor computed from some; ``read(parameter)`` returns one in full."""
    if tensor._unit_ref is not None:
        return read(tensor)
    if (copied_from := tensor._shard_state.copied_from) is not None:
        unit: Any = copied_from.unit_ref()
        flat, index = unit.find(tensor)
        return read(flat.params[index])
    call = tensor._shard_state.origin.call  # type: ignore[union-attr]
    assert call is not None
    result: Any = on_full_values(call, read)
    return result[0] if call.name in LISTS else result


def on_full_values(call: FunctionCall, read: Read) -> Any:
    """Run a function with full values in place of its sharded operands; see :func:`full_values`."""
    return call.run(call.sharded, [full_values(t, read) for t in call.sharded])


def full_tensor(tensor: ShardTensor, recording: bool = False) -> torch.Tensor:
    """Return a tensor unsharded: plain, in new memory, without gradient. Collective, unless this rank reads alone.

    `recording`: see :func:`reading`.
    """
    return fulls([tensor], f"full_tensor of {tensor._spec.name}", recording)[0]


def fulls(tensors: Sequence[ShardTensor], what: str, recording: bool = False) -> list[torch.Tensor]:
    """Return tensors unsharded, as :func:`full_tensor` does. `what`: the operation, for messages; the same on all ranks."""
    with reading(tensors, what, recording) as read:
        if read is not None:
            with torch.no_grad():
                return [full_values(t, read).detach() for t in tensors]
    return full_tensors(tensors, what)


def full_for_file(tensor: ShardTensor) -> torch.Tensor | None:
    """Return the full values of a parameter, or of a tensor computed from some, whatever other ranks do. Not collective.

    Returns None for other tensors, and where the values can't be read or computed anew.
    """
    unit = unit_of_origin(tensor)
    if unit is None or not _is_known(tensor, unit):
        return None
    if unit.is_summoned and tensor._unit_ref is not None:
        return unit.unsharded_param_of(tensor).detach().clone()  # edited, perhaps
    with unit.runtime.on_demand.alone_for_file(f"the saving of {tensor._spec.name}") as read:
        if read is None:
            return None
        with torch.no_grad():
            return full_values(tensor, read).detach()
