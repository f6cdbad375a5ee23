"""The wrapper of `torch.autograd.backward`, through which engines hear of each backward of the user's before it starts.

The wrapper also adds the unsharded parameters of sharded ones to the `inputs` of ``loss.backward(inputs=[...])``: autograd's C++
engine would find that a sharded parameter is no leaf of the graph, and silently do nothing. Without sharded inputs the wrapper
changes no argument. It is installed once, for the life of the process. `torch.autograd.grad` needs no wrapper, because it honours
`__torch_function__`. Tested on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointFunction

from ..unit.unit import unit_of
from ..utils.autograd_private import graph_task

if TYPE_CHECKING:
    from .runtime import Runtime


# The runtimes of all living engines, which hear of each backward before it starts.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def install(runtime: Runtime) -> None:
    """Tell `runtime` of each call of `torch.autograd.backward` from now on."""
    _runtimes.add(runtime)
    original = torch.autograd.backward
    if getattr(original, "_torch_shard", False):
        return

    signature = inspect.signature(original)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises torch's own error
        if given.arguments.get("inputs") is not None:
            given.arguments["inputs"] = _with_unsharded(given.arguments["inputs"])
        if graph_task() != -1:  # inside another backward, for which the runtimes are prepared
            if sys._getframe(1).f_code is CheckpointFunction.backward.__code__:
                # They end in this order, which is that of all ranks.
                for runtime in sorted(_runtimes, key=operator.attrgetter("operations.number")):
                    runtime.backwards.begin_nested()
            return original(*given.args, **given.kwargs)
        with contextlib.ExitStack() as stack:
            for runtime in list(_runtimes):
                stack.enter_context(runtime.backwards.outermost_backward())
            return original(*given.args, **given.kwargs)

    backward._torch_shard = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward  # type: ignore[assignment]


def _with_unsharded(inputs: Any) -> Any:
    """Return the `inputs` of a backward, with the unsharded parameter behind each sharded one."""
    if isinstance(inputs, (torch.Tensor, GradientEdge)):
        inputs = [inputs]
    elif isinstance(inputs, dict):
        inputs = inputs.values()
    elif not isinstance(inputs, Iterable) or isinstance(inputs, Mapping):
        return inputs  # torch raises its own error
    translated = []
    for item in inputs:
        translated.append(item)
        unit = unit_of(item)
        if unit is not None:
            translated.append(unit.differentiable(item))
    return translated
