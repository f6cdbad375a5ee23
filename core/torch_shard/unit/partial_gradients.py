"""Partially accumulated gradients: those of micro-batches under ``engine.no_sync(hold=False)``, each of which is reduced.

A partially accumulated gradient is a mean over the ranks. Under DistributedDataParallel it would be each rank's own until
the last micro-batch. The accumulated sum is the same; clipping or stepping before the accumulation has ended is not, because
neither is linear in the gradient. So an edit between micro-batches is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ShardError
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad

__all__ = ["PartialGradients"]


class PartialGradients:
    """Knows which gradients of some parameters are partially accumulated; true if any is."""

    def __init__(self, params: Sequence[ShardTensor]) -> None:
        self._params = params
        # By index, each gradient and its version as the last backward has left it. zero_grad() and clipping change these.
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, indices: Iterable[int]) -> None:
        """Note the gradients to which a backward has added that does not end the accumulation.

        Call without ``__torch_function__``.
        """
        for i in indices:
            grad: Any = own_grad(self._params[i])
            if grad is not None:
                self._left[i] = weakref.ref(grad), grad._version

    def keep(self) -> None:
        """Note the gradients as they are now: a backward has changed them, by a loss term on a sharded parameter itself."""
        if self._left:
            with torch._C.DisableTorchFunctionSubclass():
                self.note(list(self._left))

    def end(self) -> None:
        """End the accumulation."""
        self._left.clear()

    def check(self) -> None:
        """Raise if a partially accumulated gradient was edited since the last backward; forget those that were cleared.

        Raises:
            ShardError: names the parameter.
        """
        if not self._left:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for i in list(self._left):
                grad: Any = own_grad(self._params[i])
                if self._is_as_left(i, grad):
                    continue
                if grad is not None and getattr(grad, "_local", grad).count_nonzero():
                    spec = self._params[i]._spec
                    raise ShardError(
                        f"rank {spec.world_rank}: the gradient of {spec.name} was edited (clipped, perhaps) between the "
                        "micro-batches of an accumulation, under no_sync(). It is the mean over the ranks already, where each "
                        "rank of DistributedDataParallel would edit its own. Edit it after the last micro-batch: under "
                        "`if accelerator.sync_gradients:`, for example. Call zero_grad() before you go on."
                    )
                del self._left[i]

    def has(self, index: int) -> bool:
        """Return True if the gradient of parameter `index` is partially accumulated. Call without ``__torch_function__``."""
        if index not in self._left:
            return False
        grad: Any = own_grad(self._params[index])
        if grad is None or self._is_as_left(index, grad):
            return grad is not None
        return bool(getattr(grad, "_local", grad).count_nonzero())  # else it was cleared

    def _is_as_left(self, index: int, grad: torch.Tensor | None) -> bool:
        ref, version = self._left[index]
        left = ref()
        return left is not None and left is grad and left._version == version
