"""Methods of one module instance replaced by functions that know about sharding.

The class's method stays as it is, so that models that are not sharded are not touched. A deep copy of the module has the
replacement too; a pickled module has the class's own method.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


class Shadow:
    """Calls ``function(module, stock, *args, **kwargs)``; `stock` is the bound method that it stands in front of.

    `keeps` lives as long as it does: the handle of the engine, for a part of a sharded model that outlives the model itself.
    """

    def __init__(
        self, module: nn.Module, name: str, function: Callable[..., Any], previous: Any, keeps: object = None
    ) -> None:
        self._module = weakref.ref(module)  # weak, so that models are no reference cycles
        self.__name__ = name
        self._function = function
        self._previous = previous
        self._keeps = keeps
        self.__doc__ = getattr(type(module), name).__doc__

    @property
    def stock(self) -> Callable[..., Any]:
        """Return what a call would reach without this object."""
        if self._previous is not None:
            return self._previous  # type: ignore[no-any-return]
        module = self._module()
        if module is None:
            raise ReferenceError(f"{self.__name__}: its module is gone.")
        bound: Callable[..., Any] = getattr(type(module), self.__name__).__get__(module)
        return bound

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stock)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module(), self.stock, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        module: Any = self._module()
        other = memo.get(id(module), module)
        return Shadow(other, self.__name__, self._function, copy.deepcopy(self._previous, memo))

    @property
    def in_plain_module(self) -> Any:
        """The object that replaces this one in a pickle of the module; None if the class's own method takes its place."""
        return self._previous


def shadow(module: nn.Module, name: str, function: Callable[..., Any], keeps: object = None) -> None:
    """Put `function` in front of the method `name` of `module`, where its class has one, once. Not collective.

    Args:
        function: the replacement, called as ``function(module, stock, *args, **kwargs)``.
        keeps: an object that lives as long as the replacement.
    """
    if not callable(getattr(type(module), name, None)):
        return
    previous = module.__dict__.get(name)
    if isinstance(previous, Shadow):
        return
    module.__dict__[name] = Shadow(module, name, function, previous, keeps)


def unshadow(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Remove the function that :func:`shadow` has put in front of a method, if it is still there. Not collective."""
    found = module.__dict__.get(name)
    if isinstance(found, Shadow) and found._function is function:
        if found._previous is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = found._previous
