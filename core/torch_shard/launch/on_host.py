"""A mode in which a script for GPUs runs on a machine without them, up to the place where its model is planned.

Tensors that the script puts on a GPU are on the CPU instead. The trace of the step finds out on which device each would be.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import torch.cuda.amp.common as amp_common
from torch import Tensor
from torch.overrides import TorchFunctionMode

_cuda: Any = vars(torch)["cuda"]
_NOTHING = (
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)
_ZERO = ("current_device", "max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


class OnHost(TorchFunctionMode):
    """A mode in which names of GPUs mean the CPU. ``torch.cuda.is_available()`` stays False, and nothing is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._replaced = ExitStack()

    def __enter__(self) -> OnHost:
        for names, result in ((_NOTHING, None), (_ZERO, 0)):
            for name in names:
                self._replaced.enter_context(patch.object(_cuda, name, lambda *_, result=result, **__: result))
        # Else autocast and gradient scalers for CUDA would switch themselves off.
        self._replaced.enter_context(patch.object(amp_common, "amp_definitely_not_available", lambda: False))
        self._replaced.enter_context(patch.object(_cuda, "is_bf16_supported", lambda *_, **__: True))
        self._replaced.enter_context(patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._replaced.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch, with the CPU in place of a GPU."""
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], "cpu")
            kwargs.pop("device", None)
        elif func is Tensor.to:
            args = (args[0], *map(_on_host, args[1:]))
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_host(kwargs["device"])
        return func(*args, **kwargs)


def _on_host(value: Any) -> Any:
    """Return the CPU for a GPU by its name, number or object, and everything else as it is."""
    if isinstance(value, str):
        return "cpu" if value.startswith("cuda") else value
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, int) and not isinstance(value, bool) else value
