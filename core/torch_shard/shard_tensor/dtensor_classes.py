"""All that is known of torch's DTensor: parameters that tensor parallelism (``parallelize_module``) has distributed.

::

    user's parameter   ShardTensor of the DTensor's global shape, in the same object      between steps
    flat buffer        this rank's local tensors                                          sharded over the plane
    leaf               a DTensor over a view of the gathered buffer                       what modules compute with

Sharding goes on top: it cuts the local tensors, so that only ranks which have the same parts share them (a *plane*; see
:mod:`.layout.rank_topology`). Computation is DTensor's own.

Private names of torch that this rests on: DTensor's constructor, its slots ``_local_tensor`` and ``_spec``, and
``DeviceMesh._get_root_mesh``. Tested on torch 2.13.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..errors import UnitStateError
from ..layout.dtensor_placement import Placed, is_dtensor
from .tensor import ShardTensor
from .unsharded_param import InBuffer

__all__ = [
    "shard_class",
]


# -- classes ------------------------------------------------------------------------------------------------------------


@functools.cache
def shard_class() -> type[ShardTensor]:
    """The class of a parameter that was a DTensor: its object has a DTensor's slots, which ``torch.utils.swap_tensors`` can
    exchange with the like only."""
    from torch.distributed.tensor import DTensor

    class _Slots(torch.Tensor):
        __slots__ = tuple(DTensor.__slots__)

    class ShardDTensor(ShardTensor, _Slots):
        """A :class:`ShardTensor` in an object that was a DTensor."""

        _spec: Any = _Slots.__dict__["_spec"]  # not a property: swap_tensors() exchanges what is in the slots

        @classmethod
        def _wrap(cls, local: torch.Tensor, spec: Any, unit_ref: Any = None) -> ShardTensor:
            made = super()._wrap(local, spec, unit_ref)
            made._spec = spec
            return made

    return ShardDTensor


def gathered_parameter(placed: Placed, local: torch.Tensor) -> Any:
    """Return a DTensor over the memory of `local` that is an ``nn.Parameter`` and may be assigned to."""
    return _parameter(placed.over(local, _classes()[0]))


def unsharded_parameter(placed: Placed, local: torch.Tensor) -> Any:
    """Return a DTensor over the memory of `local` that modules compute with: see :class:`.unsharded_param.Leaf`."""
    return _parameter(placed.over(local, _classes()[1]))


def _parameter(tensor: Any) -> Any:
    tensor._is_param = True  # which makes it an nn.Parameter for isinstance()
    return tensor


_plain_data: Any = torch.Tensor.data  # type: ignore[attr-defined]


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Of a distributed parameter: that inside ``engine.gathered``, and that of a leaf."""
    from torch.distributed.tensor import DTensor

    class GatheredDTensor(DTensor):
        """One that can be assigned to: torch's own ``.data = `` replaces what C++ knows of a DTensor and leaves its values."""

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
            with torch.no_grad():
                self._local_tensor.copy_(value._local_tensor)

    class DTensorLeaf(InBuffer, GatheredDTensor):
        """A leaf that is a DTensor; see :class:`.unsharded_param.Leaf`."""

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

    GatheredDTensor.classes = GatheredDTensor, DTensorLeaf  # type: ignore[attr-defined]
    return GatheredDTensor, DTensorLeaf
