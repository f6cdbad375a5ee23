"""The classes of parameters that tensor parallelism has distributed as DTensors (:mod:`torch_shard.layout.dtensor_placement`).

This uses private names of torch: DTensor's slots, ``_local_tensor`` and ``_spec`` among them. Tested on torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import UnitStateError
from ..layout.dtensor_placement import Placed, is_dtensor
from .tensor import ShardTensor
from .unsharded_param import InBuffer


@functools.cache
def shard_class() -> type[ShardTensor]:
    """Return the class of a parameter that was a DTensor.

    Its objects have a DTensor's slots, because ``torch.utils.swap_tensors`` exchanges objects of equal slots only.
    """
    from torch.distributed.tensor import DTensor

    class _Slots(torch.Tensor):
        __slots__ = tuple(DTensor.__slots__)

    class ShardDTensor(ShardTensor, _Slots):
        """A :class:`ShardTensor` in an object that was a DTensor."""

        _spec: Any = _Slots.__dict__["_spec"]  # the slot in place of the property, since swap_tensors() exchanges slots

        @classmethod
        def _wrap(cls, local: torch.Tensor, spec: Any, *args: Any) -> ShardTensor:
            made = super()._wrap(local, spec, *args)
            made._spec = spec
            return made

    return ShardDTensor


def gathered_parameter(placed: Placed, local: torch.Tensor) -> Any:
    """Return a DTensor over the memory of `local` that is an ``nn.Parameter`` and may be assigned to."""
    return _parameter(placed.over(local, _classes()[0]))


def unsharded_parameter(placed: Placed, local: torch.Tensor) -> Any:
    """Return a DTensor over the memory of `local` that modules compute with: see :class:`.unsharded_param.UnshardedParam`."""
    return _parameter(placed.over(local, _classes()[1]))


def _parameter(tensor: Any) -> Any:
    tensor._is_param = True  # makes it an nn.Parameter for isinstance()
    return tensor


_plain_data: Any = torch.Tensor.data  # type: ignore[attr-defined]


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return the classes of a DTensor parameter inside ``engine.gathered``, and of one that is an unsharded parameter."""
    from torch.distributed.tensor import DTensor

    class GatheredDTensor(DTensor):
        """A DTensor whose ``.data`` can be assigned: torch's own setter leaves the local tensor as it is."""

        __slots__ = ()

        @property
        def data(self) -> Any:  # type: ignore[override]
            return _plain_data.__get__(self)

        @data.setter
        def data(self, value: Any) -> None:
            given = (tuple(value.placements), value.shape, value.dtype) if is_dtensor(value) else None
            if given != (tuple(self.placements), self.shape, self.dtype):
                raise UnitStateError(
                    f".data of a distributed parameter of shape {tuple(self.shape)}, {self.dtype}, was assigned a "
                    f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}. Assign a DTensor with the same "
                    "placements, shape and dtype, or copy into it (with torch.no_grad(): parameter.copy_(new))."
                )
            self._local_tensor = self._lasting(value._local_tensor).data  # type: ignore[misc]

        def _lasting(self, value: torch.Tensor) -> torch.Tensor:
            return value

    class UnshardedDTensor(InBuffer, GatheredDTensor):
        """An unsharded parameter that is a DTensor; see :class:`.unsharded_param.UnshardedParam`."""

        __slots__ = ()
        data_taken = False

        @property
        def data(self) -> Any:
            self.data_taken = True
            return _plain_data.__get__(self)

        @data.setter
        def data(self, value: Any) -> None:
            self.data_taken = True
            GatheredDTensor.data.__set__(self, value)  # type: ignore[attr-defined]

    GatheredDTensor.classes = GatheredDTensor, UnshardedDTensor  # type: ignore[attr-defined]
    return GatheredDTensor, UnshardedDTensor
