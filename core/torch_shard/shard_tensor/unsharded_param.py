"""What modules compute with while their unit is gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import ShardError

_data: Any = torch.Tensor.data  # type: ignore[attr-defined]
_grad: Any = torch.Tensor.grad  # type: ignore[attr-defined]


class InBuffer:
    """Of a leaf: what belongs to the user's parameter. ``.grad`` is that one's, and hooks on accumulated gradients are."""

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
        """As on the user's parameter: nothing is accumulated in the leaf."""
        param = self._param()
        if param is None:
            return super().register_post_accumulate_grad_hook(hook)  # type: ignore[misc]
        return param._unit_ref().register_post_accumulate_hook(param, hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        param = self._param()
        unit = None if param is None else param._unit_ref()
        if unit is not None:
            unit.leave_interrupted()
            if not unit.installed:  # the model is copied after an interrupt, which had left the leaf in it
                return copy.deepcopy(param, memo)
        return super().__deepcopy__(memo)  # type: ignore[misc]


class Leaf(InBuffer, nn.Parameter):
    """A parameter that is a view of its unit's gathered buffer.

    No version counter shows an edit through ``.data``, so that somebody took it is noted; what is assigned to it is
    copied where it fits, because the memory must stay the buffer's. (One that is a DTensor: :mod:`.layout.dtensor_placement`.)
    """

    data_taken: bool = False

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        self.data_taken = True
        result: torch.Tensor = _data.__get__(self)
        return result

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        own = self.data
        if value.shape == own.shape and value.dtype == own.dtype and value.device == own.device:
            with torch.no_grad():
                own.copy_(value)
        else:
            _data.__set__(self, value)


own_grad: Callable[[Any], torch.Tensor | None] = _grad.__get__
"""Return ``.grad`` as autograd keeps it, past the properties of :class:`Leaf` and of ShardTensor; for the latter call it with
``__torch_function__`` disabled."""


def set_own_grad(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    _grad.__set__(tensor, value)


def memory_of(leaf: torch.Tensor) -> torch.Tensor:
    """The leaf, or this rank's part of one that is a DTensor."""
    found: torch.Tensor = getattr(leaf, "_local_tensor", leaf)
    return found


def move(leaf: nn.Parameter, view: torch.Tensor) -> None:
    """Let `leaf` be `view`, of another buffer."""
    if memory_of(leaf) is leaf:
        _data.__set__(leaf, view)
    else:
        leaf._local_tensor = view.data  # type: ignore[attr-defined]


def show_as_plain(leaves: list[nn.Parameter], plain: bool) -> None:
    """Let leaves be of nn.Parameter's own class for a while, when nothing has to be noted."""
    for leaf in leaves:
        leaf.__dict__.pop("data_taken", None)
        shown, noted = getattr(leaf, "classes", (nn.Parameter, Leaf))
        leaf.__class__ = shown if plain else noted


def is_view(leaf: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether `leaf` is the same part of the same memory."""
    leaf = memory_of(leaf)
    return (
        leaf.data_ptr() == view.data_ptr()
        and leaf.shape == view.shape
        and leaf.stride() == view.stride()
        and leaf.dtype == view.dtype
    )


def refuse_recorded_edit(leaf: torch.Tensor, name: str, rank: int) -> None:
    """Raise if a frozen parameter was edited in place with a value that records gradients.

    In plain torch the parameter becomes part of that value's graph. Here the edit would be kept without the graph, and the
    gradient lost.

    Raises:
        ShardError: the leaf is one again.
    """
    if leaf.grad_fn is not None:
        leaf.detach_()
        raise recorded_edit(name, rank)


def recorded_edit(name: str, rank: int) -> ShardError:
    """The error for it."""
    return ShardError(
        f"rank {rank}: {name} does not require gradients, and was edited in place with a value that does. The parameter is "
        "stored in slices, which record nothing, so that this value would get no gradient. Compute out of place "
        "(weight * scale), or edit it under torch.no_grad()."
    )


def mark_of_unit(buffer: torch.Tensor) -> None:
    """Note of a unit's buffer that its memory comes and goes as the engine says, whoever has a view of it."""
    buffer.untyped_storage()._of_unit = True  # type: ignore[attr-defined]  # one object as long as the memory is there


def is_of_unit(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a view of such a buffer."""
    return getattr(tensor.untyped_storage(), "_of_unit", False)
