"""A call of a torch function, as ``__torch_function__`` of a ShardTensor sees it."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..utils.pytree import replace
from .function_sets import IN_PLACE_OPERATORS
from .tensor import ShardTensor


def name_of(func: Any) -> str:
    """Return a torch function's name, such as ``add_``; or ``__get__:data`` for the getter of a property."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name}:{getattr(func.__self__, '__name__', '')}"
    return name.split(".", 1)[0]  # an ATen overload is called "add.Tensor"


class FunctionCall:
    """A torch function with its arguments, of which some are ShardTensors.

    Attributes:
        func, args, kwargs: the call.
        name: the function's name.
        tensors: the tensors among the arguments, also inside lists and tuples, in order.
    """

    __slots__ = ("args", "func", "kwargs", "name", "tensors")

    def __init__(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.name, self.args, self.kwargs = func, name, args, kwargs
        self.tensors: list[Any] = []
        _collect(args, self.tensors)
        if kwargs:
            _collect(kwargs.values(), self.tensors)

    @property
    def sharded(self) -> list[ShardTensor]:
        """The ShardTensors among the tensors, each once."""
        return list({id(t): t for t in self.tensors if isinstance(t, ShardTensor)}.values())

    @property
    def target(self) -> Any:
        """The tensor, or list of tensors, that the function writes to; None if its result is new."""
        if "out" in self.kwargs:
            return self.kwargs["out"]
        name = self.name
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or name == "__setitem__" or name in IN_PLACE_OPERATORS:
            return self.args[0] if self.args else None
        return None

    @property
    def recipe(self) -> int:
        """A checksum of the call: the function, its arguments, and how its operands were computed from parameters.

        Ranks that make the same call have the same number. Of plain tensors only the shape and dtype count.
        """
        return zlib.crc32(repr((self.name, recipe_of(self.args), recipe_of(self.kwargs))).encode())

    def at(self, position: int) -> FunctionCall:
        """Return the call of a function of lists for one position of these, with lists of one element."""
        args: Any = [a[position : position + 1] if isinstance(a, (list, tuple)) else a for a in self.args]
        kwargs = {k: a[position : position + 1] if isinstance(a, (list, tuple)) else a for k, a in self.kwargs.items()}
        return FunctionCall(self.func, self.name, tuple(args), kwargs)

    def run(self, originals: Sequence[torch.Tensor], replacements: Sequence[torch.Tensor]) -> Any:
        """Call the function with `replacements` in the places of `originals` among the arguments."""
        found = {id(t): other for t, other in zip(originals, replacements, strict=True)}
        args, kwargs = replace((self.args, self.kwargs), found)
        return self.func(*args, **kwargs)


def recipe_of(value: Any) -> Any:
    """Return a description of an argument whose ``repr`` is the same on all ranks; see :attr:`FunctionCall.recipe`."""
    if isinstance(value, ShardTensor):
        state = value._shard_state
        made = None if state.origin is None else state.origin.recipe
        return value._spec.name, str(value.dtype), made, state.copied_from is not None
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    if isinstance(value, dict):
        return {key: recipe_of(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [recipe_of(each) for each in value]
    if isinstance(value, str):
        return value.partition(":")[0]  # the number of a device is a rank's own
    return repr(value) if isinstance(value, (bool, int, float, complex, torch.dtype)) else type(value).__name__


def _collect(values: Iterable[Any], found: list[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)
