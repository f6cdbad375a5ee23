"""What modules compute with while their unit is gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_data: Any = torch.Tensor.data  # type: ignore[attr-defined]
_grad: Any = torch.Tensor.grad  # type: ignore[attr-defined]


class Leaf(nn.Parameter):
    """A parameter that is a view of its unit's gathered buffer.

    No version counter shows an edit through ``.data``, so that somebody took it is noted; what is assigned to it is
    copied where it fits, because the memory must stay the buffer's. ``.grad`` is that of the user's parameter.
    """

    data_taken: bool = False
    _place: tuple[Any, int] | None = None  # a weak reference to the FlatBuffer, and the index there

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        flat = self._place[0]() if self._place is not None else None
        return None if flat is None else flat.params[self._place[1]].grad  # type: ignore[index]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        flat = self._place[0]() if self._place is not None else None
        if flat is not None:
            flat.params[self._place[1]].grad = value  # type: ignore[index]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """As on the user's parameter: nothing is accumulated in the leaf."""
        flat = self._place[0]() if self._place is not None else None
        if flat is None:
            return super().register_post_accumulate_grad_hook(hook)
        return flat.unit().register_post_accumulate_hook(flat.params[self._place[1]], hook)  # type: ignore[index]

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


def own_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """``tensor.grad`` as autograd keeps it, past the properties of :class:`Leaf` and of ShardTensor (for the latter with
    ``__torch_function__`` disabled)."""
    result: torch.Tensor | None = _grad.__get__(tensor)
    return result


def set_own_grad(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    _grad.__set__(tensor, value)


def move(leaf: nn.Parameter, view: torch.Tensor) -> None:
    """Let `leaf` be `view`, of another buffer."""
    _data.__set__(leaf, view)


def show_as_plain(leaves: list[nn.Parameter], plain: bool) -> None:
    """Let leaves be of nn.Parameter's own class for a while, when nothing has to be noted."""
    for leaf in leaves:
        leaf.__dict__.pop("data_taken", None)
        leaf.__class__ = nn.Parameter if plain else Leaf


def is_view(leaf: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether `leaf` is the same part of the same memory."""
    return (
        leaf.data_ptr() == view.data_ptr()
        and leaf.shape == view.shape
        and leaf.stride() == view.stride()
        and leaf.dtype == view.dtype
    )
