"""The transforms of ``torch.func`` (``grad``, ``vjp``, ``jvp``, ``vmap`` and what is made of them) around a sharded model.

Inside a transform, torch hands each operation to the transform's interpreter. Tensors are wrapped, and memory that the function
has captured must not be written to. To gather and to release parameters is no part of the function, and is done where no
interpreter is in force. The names of torch are private (torch 2.13).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

_private: Any = torch._C._functorch

running = _private.peek_interpreter_stack
"""Returns the innermost interpreter that is in force, or None."""


class _Hidden(threading.local):
    """The interpreters that this thread's running calls of :func:`outside` have put aside, the innermost call last."""

    def __init__(self) -> None:
        self.stacks: list[list[Any]] = []


_hidden = _Hidden()


def outside(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` where no interpreter is in force, and return its result."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack() as interpreters:
        _hidden.stacks.append(interpreters)
        try:
            return function(*args)
        finally:
            _hidden.stacks.pop()


def inside(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` where the interpreters are in force that the running call of :func:`outside` has put aside, if any has."""
    if not _hidden.stacks:
        return function(*args)
    from torch._functorch.pyfunctorch import temporarily_restore_interpreter_stack

    with temporarily_restore_interpreter_stack(_hidden.stacks[-1]):
        return function(*args)


def backward_is_recorded() -> bool:
    """Return True if autograd records the running backward, so that its graph may read parameters once more.

    A transform always runs its backward with recording on. Its graph can be used only if autograd also records around it.
    """
    return torch.is_grad_enabled() and (not _hidden.stacks or inside(_records_around))


def _records_around() -> bool:
    for interpreter in reversed(_private.get_interpreter_stack() or ()):
        if interpreter.key() == _private.TransformType.Grad:
            recorded: bool = _private.CGradInterpreterPtr(interpreter).prevGradMode()
            return recorded
    return True


def at_all_levels(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors and those that interpreters have wrapped in them, of which each may have a graph of its own.

    Call inside :func:`outside` if a transform runs.
    """
    if not _hidden.stacks:
        return tensors
    found: list[torch.Tensor] = []
    for tensor in tensors:
        found.append(tensor)
        while _private.is_functorch_wrapped_tensor(tensor):
            tensor = _private.get_unwrapped(tensor)
            found.append(tensor)
    return found


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that interpreters have wrapped in `tensor`, which has memory; `tensor` itself if there is none."""
    while _private.is_functorch_wrapped_tensor(tensor):
        tensor = _private.get_unwrapped(tensor)
    return tensor
