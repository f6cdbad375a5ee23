"""Full values for a full checkpoint, one unit or less at a time: first the structure is known, then the values come.

Every rank goes through the same steps. On rank 0 each step ends with full tensors, which are written and dropped before the
next step begins. So no rank holds more than one gathered unit; rank 0 may also hold a copy of one parameter.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ...optim import state_tree
from ...optim.engines_of_optimizer import params_of
from ...optim.matrix import state as matrix_state
from ...runtime.runtime import Runtime
from ...shard_tensor.tensor import ShardTensor
from ...state import model_state, optimizer_state
from ...state.param_names import names_of
from ..format.mmap_buffer import copied
from ..format.torch_file import Slot

_Put = Callable[[Callable[[], Iterable[tuple[Slot, torch.Tensor]]]], None]
"""A collective function that calls its argument on rank 0, and writes the full tensors that it returns, one by one."""


class ModelStream:
    """A model's state dict, to be gathered piece by piece.

    Attributes:
        structure: the state dict with a :class:`~..format.torch_file.Slot` for each tensor, and with torch's ``_metadata``.
            Names of tied weights share a slot.
        slots: the slots with their names, in the order in which their values come.
        key: an object that is equal on ranks that gather the same.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, dtype: torch.dtype | None) -> None:
        """Find the model's entries. Not collective.

        Args:
            model, runtime: a sharded model, outside of its forward, and its runtime.
            dtype: the dtype to which floating-point entries are converted; None keeps theirs.
        """
        self.runtime = runtime
        found = model_state.own_state_dict(model, runtime)
        self.key = [name for name, value in found.items() if isinstance(value, ShardTensor)]
        self._entries = model_state.entries_of(runtime, found)
        self.slots: list[tuple[Slot, list[str]]] = []
        self.structure: dict[str, Any] = collections.OrderedDict(found)
        if hasattr(found, "_metadata"):
            self.structure._metadata = found._metadata  # type: ignore[attr-defined]
        for entry in self._entries:
            converts = dtype is not None and entry.value.dtype.is_floating_point
            slot = Slot(entry.value.shape, dtype if converts else entry.value.dtype)  # type: ignore[arg-type]
            self.slots.append((slot, entry.names))
            self.structure.update(dict.fromkeys(entry.names, slot))

    @property
    def nbytes(self) -> int:
        """The size in bytes of the largest buffer that is gathered."""
        flats = [flat for unit in self.runtime.units for flat in unit.flats]
        return max((flat.layout.numel * flat.shard.dtype.itemsize for flat in flats), default=0)

    def send(self, put: _Put, what: str, memory: torch.Tensor) -> None:
        """Gather all values and give them to `put`. Collective.

        Buffers, and parameters that are not sharded, are rank 0's. Values are gathered in `memory`, one after the other.
        """
        for gathered in model_state.full_values(self._entries, what, memory):
            put(functools.partial(self._converted, gathered))

    def _converted(
        self, gathered: list[tuple[model_state.StateEntry, torch.Tensor]]
    ) -> Iterable[tuple[Slot, torch.Tensor]]:
        for entry, value in gathered:
            slot = self.structure[entry.names[0]]
            value = value.detach()
            yield slot, value if value.dtype == slot.dtype else copied(value, slot.dtype)


class OptimizerStream:
    """An optimizer's state by number, as ``optimizer.state_dict()`` of an unsharded model has it, to be gathered piece by piece.

    Attributes:
        structure: the state dict with a slot for each tensor that is gathered; set by :meth:`describe`, on rank 0.
        key: an object that is equal on ranks that gather the same.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, optimizer: Any) -> None:
        """Find the sharded state. Not collective.

        Raises:
            StateDictError: the optimizer holds parameters of another sharded model, or none of this one.
        """
        self.runtime = runtime
        names_of(runtime, optimizer, model)
        self.params = params_of(optimizer)
        self.taken = optimizer.state_dict()
        self._cut = optimizer_state.sharded_entries(runtime, self.params, self.taken["state"])
        self.key = (len(self.params), self._cut.key)
        self.structure: dict[str, Any] = {}
        self._slots: dict[tuple[int, Any], list[Slot]] = {}

    def describe(self, what: str) -> None:
        """Find the state that other ranks own, and make the structure. Collective."""
        given = self.taken["state"]
        self._elsewhere = matrix_state.descriptions(self.runtime, given, len(self.params), what)
        state = {number: dict(own) if isinstance(own, dict) else own for number, own in given.items()}
        for group in self._cut.batches:
            for number, slot, own in zip(group.numbers, group.flat.layout.slots, group.shards, strict=True):
                if own is not None:
                    full = own.new_empty(slot.shape, device="meta")
                    state[number][group.kind] = self._slotted(number, group.kind, full)
        for number, kind, value in self._cut.others:
            state[number][kind] = self._slotted(number, kind, value)
        for number, (_, description) in self._elsewhere.items():
            state[number] = self._slotted(number, None, description)
        ordered = {key: state[key] for key in optimizer_state.in_order(state, self.params)}
        self.structure = {"state": ordered, "param_groups": self.taken["param_groups"]}

    def _slotted(self, number: int, kind: Any, value: Any) -> Any:
        """Return a value with slots for its tensors, which are kept under the number and the kind."""
        slots = self._slots[number, kind] = []

        def slot(tensor: Any) -> Slot:
            slots.append(Slot(torch.Size(tensor.shape), tensor.dtype))
            return slots[-1]

        return state_tree.map_tensors(value, slot)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the largest buffer that is gathered."""
        batches = self._cut.batches
        return max(
            (b.flat.layout.numel * s.dtype.itemsize for b in batches for s in b.shards if s is not None), default=0
        )

    def send(self, put: _Put, what: str, memory: torch.Tensor) -> None:
        """Gather the state that is sharded, or that one rank alone has, and give it to `put`. Collective.

        `memory` is as for :meth:`ModelStream.send`.
        """
        state, wanted = self.taken["state"], self.runtime.collectives.world_rank == 0
        values = optimizer_state.full_values(self.runtime, self._cut, self._elsewhere, state, wanted, what, memory)
        for gathered in values:
            put(functools.partial(self._pairs, gathered))

    def _pairs(self, gathered: list[tuple[int, Any, Any]]) -> Iterable[tuple[Slot, torch.Tensor]]:
        for number, kind, value in gathered:
            yield from zip(self._slots[number, kind], state_tree.tensors_of(value), strict=True)
