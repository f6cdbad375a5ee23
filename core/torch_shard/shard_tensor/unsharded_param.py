"""The unsharded parameter, with which modules compute while their unit is unsharded, and functions of its memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ShardError
from ..layout.dtensor_placement import is_dtensor, local_of

_data: Any = torch.Tensor.data  # type: ignore[attr-defined]
_grad: Any = torch.Tensor.grad  # type: ignore[attr-defined]


class InBuffer:
    """A link from an unsharded parameter to the user's sharded one, which has the ``.grad`` and post-accumulate hooks."""

    __slots__ = ()
    _place: tuple[Any, int] | None = None  # a weak reference to the FlatBuffer, and the index there

    def _param(self) -> Any:
        flat = self._place[0]() if self._place is not None else None
        return None if flat is None else flat.params[self._place[1]]  # type: ignore[index]

    @property
    def grad(self) -> torch.Tensor | None:
        param = self._param()
        return None if param is None else param.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        param = self._param()
        if param is not None:
            param.grad = value

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register `hook` on the user's parameter, since no gradient is accumulated in the unsharded one."""
        param = self._param()
        if param is None:
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[misc]
        return param._unit_ref().register_post_accumulate_hook(param, hook)

    def _lasting(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the values of `value` in memory that stays as long as the forward runs.

        A unit's full buffer may be freed before, or be given other values, except for the parameter's own place there.
        """
        flat = self._place[0]() if self._place is not None else None
        is_own = flat is not None and is_view(value, flat.view(flat.full, self._place[1]))  # type: ignore[index]
        return value if is_own or not is_of_unit(value) else value.detach().clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        param = self._param()
        unit = None if param is None else param._unit_ref()
        if unit is not None:
            unit.runtime.leave_interrupted()
            if not unit.installed:  # an interrupted forward had left the unsharded parameter in the model
                return copy.deepcopy(param, memo)
        return super().__deepcopy__(memo)  # type: ignore[misc]


class UnshardedParam(InBuffer, nn.Parameter):
    """An unsharded parameter: a view of its unit's full buffer.

    No version counter shows an edit through ``.data``, so that a read of ``.data`` is noted. A value that is assigned to
    ``.data`` becomes the parameter's memory, as in plain torch, so that earlier aliases keep their values. At the end of the
    forward it is copied to the buffer (:meth:`.FlatBuffer.settle`). Unsharded parameters that are DTensors have a class of
    their own in :mod:`.dtensor_classes`.
    """

    data_taken: bool = False

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(nn.Parameter(self.detach(), self.requires_grad))  # without the name of this class

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        self.data_taken = True
        result: torch.Tensor = _data.__get__(self)
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.data_taken = True
        own: torch.Tensor = _data.__get__(self)
        if value.shape == own.shape and value.dtype == own.dtype and value.device == own.device:
            with torch.no_grad():
                if type(value) is not torch.Tensor and not isinstance(value, nn.Parameter):
                    value = torch.empty_like(own).copy_(value)  # a sharded tensor has no memory of the full shape
                else:
                    value = self._lasting(value)
        _data.__set__(self, value)


own_grad: Callable[[Any], torch.Tensor | None] = _grad.__get__
"""Return ``.grad`` as autograd keeps it, past the properties of :class:`UnshardedParam` and ShardTensor.

Call it with ``__torch_function__`` disabled for a ShardTensor."""


set_own_grad: Callable[[Any, torch.Tensor | None], None] = _grad.__set__
"""Set ``.grad`` as autograd keeps it, past the properties of :class:`UnshardedParam` and ShardTensor.

Call it with ``__torch_function__`` disabled for a ShardTensor."""


def move(param: nn.Parameter, view: torch.Tensor) -> None:
    """Point an unsharded parameter at the memory of `view`."""
    if is_dtensor(param):
        param._local_tensor = view.data  # type: ignore[attr-defined]
    else:
        _data.__set__(param, view)


def show_as_plain(params: list[nn.Parameter], plain: bool) -> None:
    """Give unsharded parameters the plain class nn.Parameter, which notes no reads of ``.data``, or their own class again."""
    for param in params:
        param.__dict__.pop("data_taken", None)
        plain_class, noting_class = getattr(param, "classes", (nn.Parameter, UnshardedParam))
        param.__class__ = plain_class if plain else noting_class


def is_view(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Return True if an unsharded parameter has the memory, shape, strides and dtype of `view`."""
    memory = local_of(param)
    return (
        memory.data_ptr() == view.data_ptr()
        and memory.shape == view.shape
        and memory.stride() == view.stride()
        and memory.dtype == view.dtype
    )


def refuse_recorded_edit(param: torch.Tensor, name: str, rank: int) -> None:
    """Raise if a frozen parameter was edited in place with a value that records gradients.

    In plain torch the parameter becomes part of that value's graph. Here the edit would be kept without the graph, and the
    gradient would be lost.

    Raises:
        ShardError: the parameter was edited with such a value; its graph has been dropped.
    """
    if param.grad_fn is not None:
        param.detach_()
        raise recorded_edit(name, rank)


def recorded_edit(name: str, rank: int) -> ShardError:
    """Return the error for an edit of a frozen parameter with a value that records gradients."""
    return ShardError(
        f"rank {rank}: {name} does not require gradients, and was edited in place with a value that does. The parameter is "
        "stored in shards, which record nothing, so that this value would get no gradient. Compute out of place "
        "(weight * scale), or edit it under torch.no_grad()."
    )


def lost_graph(name: str, rank: int) -> ShardError:
    """Return the error for a use of an alias or copy that was edited with a value that records gradients."""
    return ShardError(
        f"rank {rank}: an alias or copy of {name} (.data, detach(), clone()) was edited in place with a value that requires "
        "gradients, and is now computed with. It is stored in shards, which record nothing, so that this value would get no "
        "gradient. Compute out of place (weight.detach() * scale), or under torch.no_grad(), or with its detach()."
    )


def mark_of_unit(buffer: torch.Tensor) -> None:
    """Mark the storage of a unit's full buffer, whose memory is freed and allocated whatever views there are."""
    buffer.untyped_storage()._of_unit = True  # type: ignore[attr-defined]  # torch keeps one object for each storage


def is_of_unit(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a view of a unit's full buffer."""
    return getattr(tensor.untyped_storage(), "_of_unit", False)
