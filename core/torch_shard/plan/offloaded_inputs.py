"""Stands for :mod:`torch_shard.activation_offload` while a step is traced: the same copies of the same tensors, without values.

See there for which input is where at what time. The copies are written down as those of parameters are, but belong to no unit.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from ..config.offload import MIN_ACTIVATION_BYTES
from ..utils.autograd_private import graph_task, saved_tensors_hooks
from .step_recorder import Recorder
from .step_trace import CollectiveStart, CollectiveWait, Transfer

__all__ = ["OffloadedInputs"]


class OffloadedInputs:
    """The inputs of all offloaded layers of a model."""

    def __init__(self) -> None:
        self.last: weakref.ref[_Call] | None = None
        self._numbers = 0
        self._copies: weakref.WeakValueDictionary[Any, _Copy] = weakref.WeakValueDictionary()
        self._on_device: list[weakref.ref[_Copy]] = []

    def keep(self) -> contextlib.AbstractContextManager[Any]:
        """Keep on the host what one call of a checkpoint saves; enter it around that call."""
        if graph_task() != -1 or saved_tensors_hooks(True) is not None:
            return contextlib.nullcontext()
        on_device, self._on_device = self._on_device, []
        for ref in on_device:
            copy = ref()
            if copy is not None:
                copy.let_go()
        call = _Call(self)
        return torch.autograd.graph.saved_tensors_hooks(call.pack, call.unpack)

    @staticmethod
    def moves(tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is copied to the host."""
        is_dense = tensor.numel() == 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        return is_dense and tensor.nbytes >= MIN_ACTIVATION_BYTES and not (tensor.requires_grad and tensor.is_leaf)

    def copy_of(self, tensor: torch.Tensor) -> _Copy:
        """Return the copy of a tensor, of which there is one for all layers that take it."""
        storage = tensor.untyped_storage()
        layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        key = (storage._cdata, *layout, tensor._version)
        copy = self._copies.get(key)
        if copy is None or copy.storage() is not storage:
            copy = self._copies[key] = _Copy(self, tensor, storage)
        elif copy.source is None:
            copy.source = _OnDevice(tensor.detach(), None)
            copy.live = weakref.ref(copy.source)
        self._on_device.append(weakref.ref(copy))
        return copy

    def start(self, kind: Transfer, nbytes: int) -> int:
        """Write down that bytes begin to be copied, and return the copy's number."""
        self._numbers += 1
        Recorder.running().add(CollectiveStart(self._numbers, kind, "", nbytes))
        return self._numbers


class _OnDevice:
    """Memory on the device that a copy reads or writes; `number` is that of the copy, None if it has ended."""

    def __init__(self, tensor: torch.Tensor, number: int | None) -> None:
        self.tensor, self._number = tensor, number

    def wait(self) -> torch.Tensor:
        """Return the tensor once the copy has ended."""
        if self._number is not None:
            Recorder.running().add(CollectiveWait(self._number))
            self._number = None
        return self.tensor


class _Copy:
    """One tensor on the host."""

    def __init__(self, offload: OffloadedInputs, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        self.storage = weakref.ref(storage)
        self._offload = offload
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._place = Recorder.running().place_of(tensor)
        self._on_host = self._allocated("cpu")
        self.source: _OnDevice | None = _OnDevice(tensor.detach(), offload.start("to_host", tensor.nbytes))
        self.live = weakref.ref(self.source)

    def _allocated(self, place: str) -> torch.Tensor:
        with Recorder.running().placing(place):
            return torch.empty_strided(self._shape, self._stride, dtype=self._dtype)

    def let_go(self) -> None:
        """Give the device's memory back."""
        if self.source is not None:
            self.source.wait()
            self.source = None

    def on_device(self) -> _OnDevice:
        """Return the tensor on the device, to which it may still be on its way."""
        there = self.source or self.live()
        if there is None:
            there = _OnDevice(self._allocated(self._place), self._offload.start("to_device", self._on_host.nbytes))
            self.live = weakref.ref(there)
        return there


class _Kept:
    """What autograd keeps in place of a tensor."""

    def __init__(self, copy: _Copy) -> None:
        self.copy = copy
        self._there: _OnDevice | None = None

    def ask(self) -> None:
        if self._there is None:
            self._there = self.copy.on_device()

    def take(self) -> torch.Tensor:
        self.ask()
        there, self._there = self._there, None
        assert there is not None
        if self.copy.source is there:
            self.copy.source = None
        return there.wait()


class _Call:
    """One call of a checkpoint."""

    def __init__(self, offload: OffloadedInputs) -> None:
        self._offload = offload
        self._kept: list[weakref.ref[_Kept]] = []
        self._before: weakref.ref[_Call] | None = None
        self._asked = -1  # by which backward

    def pack(self, tensor: torch.Tensor) -> Any:
        if not self._offload.moves(tensor):
            return tensor
        if not self._kept:
            self._before, self._offload.last = self._offload.last, weakref.ref(self)
        kept = _Kept(self._offload.copy_of(tensor))
        self._kept.append(weakref.ref(kept))
        return kept

    def unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, _Kept):
            return kept  # type: ignore[no-any-return]
        for call in (self, None if self._before is None else self._before()):
            if call is not None:
                call._ask()
        return kept.take()

    def _ask(self) -> None:
        """Ask for all tensors that are kept, once in a backward."""
        if self._asked != graph_task():
            self._asked = graph_task()
            for kept in (ref() for ref in self._kept):
                if kept is not None:
                    kept.ask()
