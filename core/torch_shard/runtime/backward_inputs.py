"""`backward(inputs=parameters)` for sharded parameters: the one function of torch's namespace that is wrapped.

`loss.backward(inputs=[...])` hands plain Python objects to autograd's C++ engine, which would find that a sharded
parameter is no leaf of the graph and silently do nothing. No hook of torch sees that call. So `torch.autograd.backward` is
wrapped once, for the life of the process; without sharded inputs the wrapper changes no argument. The wrapper also tells
every engine when a user's backward begins and ends. `torch.autograd.grad` needs no wrapper, because it honours
`__torch_function__`. Tested on torch 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..shard_tensor.tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime


# The runtimes of all living engines, which hear of each backward before it starts.
_runtimes: weakref.WeakSet[Runtime] = weakref.WeakSet()


def install(runtime: Runtime) -> None:
    """Have `runtime` follow `torch.autograd.backward` from now on, which is wrapped once."""
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
            given.arguments["inputs"] = _with_leaves(given.arguments["inputs"])
        if torch._C._current_graph_task_id() != -1:  # inside another backward, for which the runtimes are prepared
            return original(*given.args, **given.kwargs)
        with contextlib.ExitStack() as stack:
            for runtime in list(_runtimes):
                stack.enter_context(runtime.outermost_backward())
            return original(*given.args, **given.kwargs)

    backward._torch_shard = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward  # type: ignore[assignment]


def _with_leaves(inputs: Any) -> Any:
    """Return the `inputs` of a backward, with the unsharded parameter after each sharded one."""
    if isinstance(inputs, torch.Tensor):
        inputs = [inputs]
    elif isinstance(inputs, dict):
        inputs = inputs.values()
    elif not isinstance(inputs, Iterable) or isinstance(inputs, Mapping):
        return inputs  # torch raises its own error
    translated = []
    for item in inputs:
        translated.append(item)
        if isinstance(item, ShardTensor):
            unit = item._unit
            if unit is not None:
                translated.append(unit.differentiable(item))
    return translated
