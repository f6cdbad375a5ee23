"""Gradients of an accumulation that has not ended, of which each micro-batch is reduced: ``engine.no_sync(hold=False)``.

They are means over the ranks, where those of DistributedDataParallel's ranks are each rank's own until the last micro-batch.
Their sum comes out the same. What is not linear in them does not: to clip them, or to step with them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import ShardError
from .leaf import own_grad
from .shard_tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Unfinished", "refuse_unfinished"]


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


def refuse_unfinished(runtime: Runtime, parameters: Iterable[torch.Tensor] | None, what: str) -> None:
    """Raise where `what` would do something to gradients that is not linear in them. Not collective.

    Args:
        runtime: of the engine.
        parameters: whose gradients, of any models; None for all.
        what: for the message.

    Raises:
        ShardError: on all ranks; every backward of one of them since zero_grad() ran under no_sync().
    """
    flats = [flat for unit in runtime.units for flat in unit.flats if flat.gradients.unfinished]
    chosen = set(map(id, parameters)) if flats and parameters is not None else None
    with torch._C.DisableTorchFunctionSubclass():
        for flat in flats:
            for i, p in enumerate(flat.params):
                if (chosen is None or id(p) in chosen) and flat.gradients.unfinished.has(i):
                    raise ShardError(
                        f"rank {p._spec.world_rank}: {what} with a gradient of {p._spec.name} to which only backwards under "
                        "no_sync() have added since zero_grad(). It is the mean over the ranks already, where each rank of "
                        "DistributedDataParallel would have its own. Run the last backward, with its forward, outside."
                    )
