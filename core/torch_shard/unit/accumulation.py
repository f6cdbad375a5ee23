"""The gradients of an accumulation under ``engine.no_sync()``, between its backwards.

*Deferred* gradients are this rank's own; their reduction is still to come. *Partially accumulated* gradients
(``no_sync(hold=False)``) are means over the ranks, of the micro-batches so far. Under DistributedDataParallel they would be each
rank's own until the last micro-batch. The accumulated sum is the same; clipping or stepping before the accumulation has ended is
not, because neither is linear in the gradient. So an edit between two backwards is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ShardError
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad


class Accumulation:
    """The gradients of some parameters, by index, as the last backward of an accumulation has left them."""

    def __init__(self, params: Sequence[ShardTensor]) -> None:
        self._params = params
        # Each `.grad` and its version. zero_grad() and edits change these.
        self._left: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.partial: set[int] = set()  # the partially accumulated ones

    def note(self, indices: Iterable[int]) -> None:
        """Note the gradients as a backward leaves them. Call without ``__torch_function__``."""
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
        self.partial.clear()

    def check(self) -> list[int]:
        """Return the gradients that the user has cleared since the last backward, and forget them.

        Raises:
            ShardError: a gradient was edited; names the parameter.
        """
        cleared: list[int] = []
        if not self._left:
            return cleared
        with torch._C.DisableTorchFunctionSubclass():
            for i in list(self._left):
                if self.is_unchanged(i):
                    continue
                if not self._is_cleared(i):
                    spec = self._params[i]._spec
                    raise ShardError(
                        f"rank {spec.world_rank}: the gradient of {spec.name} was edited (clipped, perhaps) between the "
                        "backwards of an accumulation, under no_sync(), where each rank of DistributedDataParallel would edit "
                        "its own. Edit it after the last backward (under `if accelerator.sync_gradients:`, for example). Call "
                        "zero_grad() before you go on."
                    )
                del self._left[i]
                self.partial.discard(i)
                cleared.append(i)
        return cleared

    def is_partial(self, index: int) -> bool:
        """Return True if a gradient is partially accumulated. Call without ``__torch_function__``."""
        return index in self.partial and self.holds(index)

    def holds(self, index: int) -> bool:
        """Return True if the user has not cleared a gradient since the last backward. Call without ``__torch_function__``."""
        # Identity is compared first: all ranks must answer alike, and this rank's shard may be empty.
        return index in self._left and (self.is_unchanged(index) or not self._is_cleared(index))

    def is_unchanged(self, index: int) -> bool:
        """Return True if a gradient is what the last backward has left. Call without ``__torch_function__``."""
        if index not in self._left:
            return False
        grad = own_grad(self._params[index])
        left, version = self._left[index]
        return grad is not None and left() is grad and grad._version == version

    def _is_cleared(self, index: int) -> bool:
        grad: Any = own_grad(self._params[index])
        return grad is None or not getattr(grad, "_local", grad).count_nonzero()
