"""The optimizer steps that run now.

They are found on Python's stack, because torch calls no hook when a step fails.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import ShardError
from .engines_of_optimizer import first_runtime
from .failed_steps import explained
from .optimizer_proxy import OptimizerProxy
from .registry import kind_of


def attached_step(function: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``step`` for an optimizer that torch's hooks don't see.

    Args:
        function: the ``step`` of the optimizer's class.
        step: what to call with the optimizer, or a copy of it: `function`, or what the user has put in its place.
    """

    def attached(*args: Any, **kwargs: Any) -> Any:
        this = args[0]
        # The leading engine now: the one that the optimizer was attached to may be closed, or another one may lead.
        runtime = first_runtime(this)
        watch = None if runtime is None else runtime.steps()
        if watch is not None:
            args, kwargs = watch.before(this, args, kwargs, function, sys._getframe(1)) or (args, kwargs)
        with explained(this):
            result = step(*args, **kwargs)
        if watch is not None:
            watch.after(this, args, kwargs)
        return result

    attached.attached = True  # type: ignore[attr-defined]
    return attached


# The functions that call the ``step`` of a class, with its arguments in a local variable "args": torch's wrapper (2.11 to 2.13),
# and ours.
_CALLERS = frozenset(
    {torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__, attached_step(None, lambda _: None).__code__}  # type: ignore[attr-defined]
)


def steps_on_stack(frame: Any) -> Iterator[Any]:
    """Yield the ``self`` of each step that `frame` is in, the innermost first: an optimizer of the user's, or a proxy."""
    while frame is not None:
        if frame.f_code in _CALLERS:
            yield frame.f_locals["args"][0]
        frame = frame.f_back


class UnknownSteps:
    """The steps of optimizers of no kind, which get the sharded tensors.

    Errors about operations that sharded tensors can't do name the optimizer.
    """

    def __init__(self) -> None:
        self._refused: weakref.ref[Any] | None = None

    def runs(self) -> bool:
        """Return True while the step of such an optimizer runs."""
        return _unknown(sys._getframe(1)) is not None

    def refuse(self, message: str) -> str:
        """Return `message`, the text of an error about an operation, and add the optimizer that has called it."""
        optimizer = _unknown(sys._getframe(1))
        if optimizer is None:
            return message
        self._refused = weakref.ref(optimizer)
        name = type(optimizer).__qualname__
        return (
            f"{message} It was called by {name}.step(), an optimizer that the engine does not know, which may have changed some "
            "parameters before. If it updates each parameter by itself, declare it: "
            f"torch_shard.optim.register({name}, kind='matrix')."
        )

    def begin(self, optimizer: Any) -> None:
        """Begin a step of `optimizer`."""
        if self._refused is not None and self._refused() is optimizer:
            self._refused = None

    def end(self, optimizer: Any) -> None:
        """End a step of `optimizer`.

        Raises:
            ShardError: the step has caught the error of an operation that was refused, and gone on in another way than on plain
                parameters.
        """
        if self._refused is not None and self._refused() is optimizer:
            self._refused = None
            raise ShardError(
                f"{type(optimizer).__qualname__}.step() went on after an operation that sharded parameters can't do, so it is "
                "not the step that it is on plain ones; go on from a checkpoint. Don't catch that error, or declare the class: "
                "torch_shard.optim.register."
            )


def _unknown(frame: Any) -> Any:
    for optimizer in steps_on_stack(frame):
        if not isinstance(optimizer, OptimizerProxy) and kind_of(type(optimizer)) is None:
            return optimizer
    return None
