"""Private names of torch: the running graph task, sequence numbers of nodes, hooks for saved tensors, uses of memory, and
whether ``functional_call`` runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch


def inside_functional_call() -> bool:
    """Return True inside `torch.func.functional_call`, which puts the caller's own tensors into the modules for one call."""
    stack = traceback.walk_stack(sys._getframe(1))
    return any(frame.f_globals.get("__name__") == "torch.nn.utils.stateless" for frame, _ in stack)


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's memory.

    There is one for each tensor over it, of Python or of C++, and one for the storage object that this function makes. The torch
    function is undocumented (torch 2.11 to 2.13).
    """
    found: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return found


graph_task = torch._C._current_graph_task_id  # -1 outside backward; no public accessor (torch 2.13)
sequence_number = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
# The hooks that `torch.autograd.graph.saved_tensors_hooks` has pushed last, or None; no public accessor (torch 2.8 to 2.13).
saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks


def outside_saved_tensors_hooks(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` where no hooks of saved tensors are in force, and return its result.

    A collective must begin there. While a profiler records, Gloo's thread ends a work in the thread-local state in which the work
    began. To refer to hooks in that state, the thread takes Python's lock while it holds the lock of the work.
    ``Work.is_completed`` takes these locks in the other order, so that both threads would wait for ever (torch 2.11 to 2.13).
    """
    private: Any = torch._C._autograd
    if saved_tensors_hooks(True) is None or not private._saved_tensors_hooks_is_enabled():
        return function(*args, **kwargs)
    hidden = []
    while (hooks := saved_tensors_hooks(True)) is not None:
        hidden.append(hooks)
        private._pop_saved_tensors_default_hooks()
    try:
        return function(*args, **kwargs)
    finally:
        for hooks in reversed(hidden):
            private._push_saved_tensors_default_hooks(*hooks)
