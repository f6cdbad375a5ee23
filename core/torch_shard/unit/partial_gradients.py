"""Gradients of an accumulation that has not ended, of which each micro-batch is reduced: ``engine.no_sync(hold=False)``.

They are means over the ranks, where those of DistributedDataParallel's ranks are each rank's own until the last micro-batch.
Their sum comes out the same. What is not linear in them does not: to clip them, or to step with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ShardError
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad

__all__ = ["Unfinished"]


class Unfinished:
    """Which gradients of some parameters are so."""

    def __init__(self, params: Sequence[ShardTensor]) -> None:
        self._params = params
        # By index, gradients and their versions as the last backward has left them: zero_grad() clears, and clipping edits them.
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def note(self, indices: Iterable[int]) -> None:
        """A backward that does not end the accumulation has added to these. Call without ``__torch_function__``."""
        for i in indices:
            grad: Any = own_grad(self._params[i])
            if grad is not None:
                self._left[i] = weakref.ref(grad), grad._version

    def keep(self) -> None:
        """What was done to them up to now was done by a backward: a loss term on a sharded parameter itself adds to it."""
        if self._left:
            with torch._C.DisableTorchFunctionSubclass():
                self.note(list(self._left))

    def end(self) -> None:
        """The accumulation has ended."""
        self._left.clear()

    def check(self) -> None:
        """Before a backward adds to them.

        Raises:
            ShardError: one was edited.
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
        """Whether this gradient is one. Call without ``__torch_function__``."""
        if index not in self._left:
            return False
        grad: Any = own_grad(self._params[index])
        if grad is None or self._is_as_left(index, grad):
            return grad is not None
        return bool(getattr(grad, "_local", grad).count_nonzero())  # edited, or cleared

    def _is_as_left(self, index: int, grad: torch.Tensor | None) -> bool:
        ref, version = self._left[index]
        left = ref()
        return left is not None and left is grad and left._version == version
