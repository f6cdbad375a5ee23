"""Full values for a full checkpoint, one unit or less at a time: what is there is known first, the values come after.

Every rank goes through the same steps; on rank 0 each one ends with full tensors, which are written and dropped before the
next begins. So no rank holds more than a unit of what is gathered, and rank 0 what it has to copy of one parameter besides.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError
from ...optim.matrix import state as matrix_state
from ...runtime.runtime import Runtime
from ...shard_tensor.tensor import ShardTensor
from ...shard_tensor.wrapper_subclasses import is_wrapper
from ...state import model_state, optimizer_state
from ...unit.flat_buffer import FlatBuffer
from ...unit.full_values import full_flat, full_tensors_from
from ..format.mmap_buffer import copied
from ..format.torch_file import Slot
from .tied_weights import memory_key

__all__ = ["ModelStream", "OptimizerStream", "Put"]

Put = Callable[[Callable[[], Iterable[tuple[Slot, torch.Tensor]]]], None]
"""Collective: calls its argument on rank 0, and writes the full tensors that it gives, one by one."""


class ModelStream:
    """A model's state dict.

    Attributes:
        structure: the state dict with a :class:`~..format.torch_file.Slot` for each tensor, and with torch's ``_metadata``.
            Names of one tied parameter share a slot.
        names: of each slot, in the order of the state dict.
        order: the slots as they come.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, dtype: torch.dtype | None) -> None:
        """Not collective.

        Args:
            model, runtime: sharded, and not inside a forward.
            dtype: what floating-point entries become; None leaves them.
        """
        self.runtime, self.dtype = runtime, dtype
        self.found = model_state.own_state_dict(model, runtime)
        self.structure: dict[str, Any] = collections.OrderedDict()
        if hasattr(self.found, "_metadata"):
            self.structure._metadata = self.found._metadata  # type: ignore[attr-defined]
        self._slots: dict[Any, Slot] = {}
        self._named: dict[int, list[str]] = {}
        self._flats: dict[int, list[tuple[int, Slot]]] = {}
        self._rest: list[tuple[Slot, ShardTensor]] = []
        self._plain: list[tuple[Slot, torch.Tensor]] = []
        flats = {id(flat.layout): flat for unit in runtime.units for flat in unit.flats}
        for name, value in self.found.items():
            if not isinstance(value, torch.Tensor):
                self.structure[name] = value
                continue
            slot = self.structure[name] = self._slot_of(value, flats)
            self._named.setdefault(id(slot), []).append(name)

    def _slot_of(self, value: Any, flats: dict[int, FlatBuffer]) -> Slot:
        """Return a tensor's slot; notes where its values will come from."""
        flat = _flat_of(value, flats)
        key = _memory(value) if flat is None else (id(flat), value._spec.index)
        if key in self._slots:
            return self._slots[key]
        slot = self._slots[key] = Slot(value.shape, self._dtype_of(value))
        if flat is not None:
            self._flats.setdefault(id(flat), []).append((value._spec.index, slot))
        elif isinstance(value, ShardTensor):
            self._rest.append((slot, value))
        else:
            self._plain.append((slot, value))
        return slot

    def _dtype_of(self, value: torch.Tensor) -> torch.dtype:
        dtype = value._local.dtype if isinstance(value, ShardTensor) else value.dtype
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    @property
    def order(self) -> list[Slot]:
        flats = [flat for unit in self.runtime.units for flat in unit.flats]
        cut = [slot for flat in flats for _, slot in self._flats.get(id(flat), ())]
        return cut + [slot for slot, _ in (*self._rest, *self._plain)]

    def names(self, slot: Slot) -> list[str]:
        return self._named[id(slot)]

    @property
    def key(self) -> object:
        """Equal on ranks that gather the same."""
        return [name for name, value in self.found.items() if isinstance(value, ShardTensor)]

    @property
    def nbytes(self) -> int:
        """Of the largest buffer that is gathered."""
        flats = [flat for unit in self.runtime.units for flat in unit.flats]
        return max((flat.layout.numel * flat.shard.dtype.itemsize for flat in flats), default=0)

    def send(self, put: Put, what: str, memory: torch.Tensor) -> None:
        """Gather and hand on all values. Collective.

        Buffers, and parameters that are not sharded, are rank 0's. `memory` is what values are gathered in, one after the other.
        """
        for unit in self.runtime.units:
            for flat in unit.flats:
                entries = self._flats.get(id(flat))
                if entries:
                    full = full_flat(flat, what, memory)
                    put(functools.partial(self._of_flat, flat, full, entries))
        for slot, value in self._rest:
            put(functools.partial(self._one, slot, value.full_tensor()))
        # Ranks need not agree on these, so that they are one step.
        put(lambda: ((slot, self._converted(value)) for slot, value in self._plain))

    def _one(self, slot: Slot, full: torch.Tensor) -> Iterator[tuple[Slot, torch.Tensor]]:
        yield slot, self._converted(full)

    def _of_flat(
        self, flat: FlatBuffer, full: torch.Tensor, entries: list[tuple[int, Slot]]
    ) -> Iterator[tuple[Slot, torch.Tensor]]:
        for index, slot in entries:
            yield slot, self._converted(flat.view(full, index))

    def _converted(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        dtype = self._dtype_of(value)
        return value if value.dtype == dtype else copied(value, dtype)


class OptimizerStream:
    """An optimizer's state, as ``optimizer.state_dict()`` of an unsharded model has it: by number.

    Attributes:
        structure: on rank 0, with a slot for each tensor that comes later; there after :meth:`describe`.
        key: equal on ranks that gather the same.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, optimizer: Any) -> None:
        """Not collective.

        Raises:
            StateDictError: it holds a parameter that is not this model's.
            CheckpointError: its state has tensors that consist of others.
        """
        self.runtime = runtime
        optimizer_state.names_of(runtime, optimizer, model)
        self.params = [p for group in optimizer.param_groups for p in group["params"]]  # torch counts like this
        self.taken = optimizer.state_dict()
        _refuse_wrappers(runtime, optimizer, self.taken["state"])
        self._cut = optimizer_state.sharded_entries(runtime, self.params, self.taken["state"])
        self.key = (len(self.params), self._cut.key)
        self.structure: dict[str, Any] = {}
        self._slots: dict[tuple[int, str], Slot] = {}

    def describe(self, what: str) -> None:
        """Find out what other ranks own, and make the structure. Collective."""
        given = self.taken["state"]
        self._elsewhere = matrix_state.descriptions(self.runtime, given, len(self.params), what)
        state = {number: dict(own) if isinstance(own, dict) else own for number, own in given.items()}
        self._numbers = {id(p): number for number, p in enumerate(self.params)}
        for flat, entry, shards in self._cut.jobs:
            for i, own in enumerate(shards):
                if own is not None:
                    number = self._numbers[id(flat.params[i])]
                    self._place(state, number, entry, torch.Size(flat.layout.slots[i].shape), own.dtype)
        for number, entry, value in self._cut.rest:
            self._place(state, number, entry, value.shape, value.dtype)
        self._owned: dict[int, list[Slot]] = {}
        for number, (_, description) in self._elsewhere.items():
            slots = self._owned[number] = []

            def proxy(found: matrix_state.Sent, slots: list[Slot] = slots) -> Slot:
                slots.append(Slot(torch.Size(found.shape), found.dtype))
                return slots[-1]

            state[number] = matrix_state.mapped(description, proxy)
        numbers = sorted(number for number in state if optimizer_state.is_number(number, self.params))
        others = [key for key in state if not optimizer_state.is_number(key, self.params)]
        self.structure = {
            "state": {key: state[key] for key in (*numbers, *others)},
            "param_groups": self.taken["param_groups"],
        }

    def _place(self, state: dict[Any, Any], number: int, entry: str, shape: torch.Size, dtype: torch.dtype) -> None:
        state[number][entry] = self._slots[number, entry] = Slot(shape, dtype)

    @property
    def nbytes(self) -> int:
        """Of the largest buffer that is gathered."""
        sizes = [flat.layout.numel * _dtype_of(shards).itemsize for flat, _, shards in self._cut.jobs]
        return max(sizes, default=0)

    def send(self, put: Put, what: str, memory: torch.Tensor) -> None:
        """Gather and hand on what is sharded, or another rank has alone. Collective; `memory` as for the model."""
        for flat, entry, shards in self._cut.jobs:
            full = full_tensors_from(flat, shards, what, memory)
            numbers = [self._numbers[id(flat.params[i])] for i, value in enumerate(full) if value is not None]
            slots = [self._slots[number, entry] for number in numbers]
            put(functools.partial(zip, slots, [value for value in full if value is not None]))
        for number, entry, value in self._cut.rest:
            put(functools.partial(zip, [self._slots[number, entry]], [value.full_tensor()]))
        wanted = self.runtime.collectives.world_rank == 0
        for number, (source, description) in self._elsewhere.items():
            given = self.taken["state"]
            entries = matrix_state.sent(self.runtime, given, number, source, description, wanted, what)
            put(functools.partial(zip, self._owned[number], matrix_state.tensors_of(entries)))
            del entries


def _refuse_wrappers(runtime: Runtime, optimizer: Any, state: Any) -> None:
    """Raise where a value of the state can't be streamed, because it has no memory of its own. Not collective.

    Raises:
        CheckpointError: names the class, and the remedy.
    """
    for number, entries in state.items():
        for key, value in entries.items() if isinstance(entries, dict) else ():
            if is_wrapper(value):
                raise CheckpointError(
                    f"rank {runtime.collectives.world_rank}: {key} of parameter {number} in {type(optimizer).__name__}'s state "
                    f"is a {type(value).__name__}, which is made of several tensors; one file can't be written of such state "
                    "piece by piece. Write a folder, engine.save, or gather it: engine.optim_state_dict."
                )


def _dtype_of(shards: Iterable[torch.Tensor | None]) -> torch.dtype:
    return next(own.dtype for own in shards if own is not None)


def _flat_of(value: Any, flats: dict[int, FlatBuffer]) -> FlatBuffer | None:
    """Return where a parameter is; None for what a hook of the module has made of one, and what tensor parallelism cuts, too."""
    flat = flats.get(id(value._spec.layout)) if isinstance(value, ShardTensor) else None
    return flat if flat is not None and not flat.split and model_state.is_parameter(value, flat) else None


def _memory(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that are the same values in the same memory."""
    if isinstance(tensor, ShardTensor) and tensor._unit_ref is not None:
        return id(tensor._spec), tensor._local.data_ptr(), tensor._local.dtype
    if isinstance(tensor, ShardTensor) or not tensor.numel() or tensor.layout != torch.strided:
        return id(tensor)
    return memory_key(tensor)
