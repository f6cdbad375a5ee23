"""The collectives that a process issues, noted as torch sees them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass
class Collectives(TorchDispatchMode):
    """Context in which this process's collectives are noted: each is an operator of the namespace ``c10d``.

    Attributes:
        calls: name of the operator, bytes of its input, dtypes of them, name of its process group.
    """

    calls: list[tuple[str, int, set[torch.dtype], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented  # sharded parameters first: what they call comes back here
        if func.namespace == "c10d":
            # All-gather and all-to-all have their output first.
            given = args[1 if func._opname in ("_allgather_base_", "alltoall_base_", "_reduce_scatter_base_") else 0]
            tensors = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
            nbytes = sum(t.numel() * t.element_size() for t in tensors)
            self.calls.append((func._opname, nbytes, {t.dtype for t in tensors}, _group_name(args)))
        return func(*args, **(kwargs or {}))

    def named(self, *names: str) -> list[tuple[str, int, set[torch.dtype], str]]:
        return [call for call in self.calls if call[0] in names]


def _group_name(args: Any) -> str:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            try:
                return str(torch.distributed.ProcessGroup.unbox(arg).group_name)
            except (RuntimeError, TypeError):
                continue  # a boxed ReduceOp
    raise TypeError("a collective without a process group")
