"""A stand-in for :mod:`torch_shard.activation_offload` while a step is traced: the same copies of tensors, without values.

The copies are written down as those of parameters are, but belong to no unit.
"""

from __future__ import annotations

import torch

from ..config.offload import MIN_ACTIVATION_BYTES
from ..schedule.kept_inputs import HostCopy, KeptInputs, OnDevice
from .step_recorder import Recorder
from .step_trace import CollectiveStart, CollectiveWait, Transfer


class OffloadedInputs(KeptInputs["_OnDevice"]):
    """The inputs of all offloaded layers of a model."""

    def __init__(self) -> None:
        super().__init__(MIN_ACTIVATION_BYTES)
        self._numbers = 0

    def _new_copy(self, tensor: torch.Tensor) -> _Copy:
        """Write down that a tensor is copied to the host."""
        return _Copy(self, tensor)

    def start(self, kind: Transfer, nbytes: int) -> int:
        """Write down that bytes begin to be copied, and return the copy's number."""
        self._numbers += 1
        Recorder.running().add(CollectiveStart(self._numbers, kind, "", nbytes))
        return self._numbers


class _OnDevice(OnDevice):
    """Memory on the device; `number` is that of the copy, None if it has ended."""

    def __init__(self, tensor: torch.Tensor, number: int | None) -> None:
        super().__init__(tensor)
        self._number = number

    def wait(self) -> torch.Tensor:
        if self._number is not None:
            Recorder.running().add(CollectiveWait(self._number))
            self._number = None
        return self.tensor


class _Copy(HostCopy[_OnDevice]):
    """One tensor on the host."""

    def __init__(self, offload: OffloadedInputs, tensor: torch.Tensor) -> None:
        self._offload = offload
        self._shape, self._stride, self._dtype = tensor.shape, tensor.stride(), tensor.dtype
        self._place = Recorder.running().storages.place_of(tensor)
        self._on_host = self._allocated("cpu")
        source = _OnDevice(tensor.detach(), offload.start("to_host", tensor.nbytes))
        super().__init__(tensor.untyped_storage(), source)

    def _allocated(self, place: str) -> torch.Tensor:
        with Recorder.running().storages.placing(place):
            return torch.empty_strided(self._shape, self._stride, dtype=self._dtype)

    def copy_back(self) -> _OnDevice:
        tensor = self._allocated(self._place)
        return _OnDevice(tensor, self._offload.start("to_device", self._on_host.nbytes))

    def resident(self, tensor: torch.Tensor) -> _OnDevice:
        return _OnDevice(tensor, None)
