"""Gradients that wait for the others of their unit, so that one kernel copies them all; on devices.

A gradient that nobody else refers to can't change any more, so that it may be copied later: `AccumulateGrad` steals such a
gradient for the same reason. Any other gradient is copied when it arrives, and on the CPU every one: a copy costs no launch
there, and the values are still in the cache.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import torch

# The most elements of padding that are set to zero by copying zeros along with the gradients, not by a kernel of its own.
_SHORT = 1 << 14


def _references(grads: tuple[torch.Tensor | None, ...]) -> tuple[int, ...]:
    """Return how often C++ and Python refer to the gradient that a hook was given, to its memory, and to the base of a view."""
    use_count: Any = torch.Tensor._use_count  # type: ignore[attr-defined]  # undocumented (torch 2.13)
    grad: Any = grads[0]
    found = use_count(grad), sys.getrefcount(grad), torch._C._storage_Use_Count(grad.untyped_storage()._cdata)
    base = grad._base
    return found if base is None else (*found, use_count(base), sys.getrefcount(base))


@functools.cache
def least_references(view: bool) -> tuple[int, ...]:
    """Return the reference counts of a gradient that only autograd holds. Call it first outside backward, as it runs one."""
    found: list[tuple[int, ...]] = []
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, 1, device="cpu", requires_grad=True)
        node = torch.autograd.graph.get_gradient_edge(leaf).node
        node.register_prehook(lambda grads: found.append(_references(grads)))
        torch.autograd.backward((2 * (leaf.t() if view else leaf)).sum())
    return found[0]


def is_unshared(grads: tuple[torch.Tensor | None, ...]) -> bool:
    """Return True if only autograd refers to the gradient that it passes to a node's hook. Pass the hook's argument itself."""
    found = _references(grads)
    return all(map(int.__le__, found, least_references(len(found) > 3)))


class HeldGradients:
    """The gradients of one flat buffer that have arrived, and have not been copied yet."""

    def __init__(self, gaps: Sequence[tuple[int, int]]) -> None:
        """Hold nothing. `gaps` are the ranges of the flat buffer that belong to no parameter."""
        self._grads: dict[int, tuple[torch.Tensor, bool]] = {}  # by parameter; True if the gradient adds to its slot
        self._gaps = gaps
        self._longest = max((stop - start for start, stop in gaps), default=0)
        self._zeros: torch.Tensor | None = None  # of the gradients' dtype, for the padding

    def __bool__(self) -> bool:
        return bool(self._grads)

    def __contains__(self, index: int) -> bool:
        return index in self._grads

    def hold(self, index: int, grad: torch.Tensor, adds: bool) -> None:
        """Keep a gradient that nobody else refers to. `adds`: its slot has the gradient of an earlier backward."""
        self._grads[index] = grad, adds

    def fit_slots(self, dtype: torch.dtype) -> bool:
        """Return True if slots of `dtype` take the held gradients without a sum or a cast."""
        return not any(adds or grad.dtype != dtype for grad, adds in self._grads.values())

    def copy_to(self, flat: torch.Tensor, views: Sequence[torch.Tensor], factor: float, whole: bool) -> bool:
        """Copy or add the gradients, times `factor`, to their slots, the `views` of `flat`. They are held until :meth:`forget`.

        With `whole`, set the padding of `flat` to zero, too, if that costs no kernel of its own; return True if it was set.
        """
        fresh = [(views[i], grad) for i, (grad, adds) in self._grads.items() if not adds]
        more = [(views[i], grad) for i, (grad, adds) in self._grads.items() if adds]
        whole = whole and bool(fresh) and self._longest <= _SHORT
        if fresh:
            into, grads = map(list, zip(*fresh, strict=True))
            padding = [flat[start:stop] for start, stop in self._gaps] if whole else []
            zeros = [self._zero(len(gap), grads[0]) for gap in padding]
            torch._foreach_copy_(into + padding, grads + zeros)
            if factor != 1.0:  # behind the copy, so that the product is not rounded to the gradients' dtype
                torch._foreach_mul_(into, factor)
        if more:
            into, grads = map(list, zip(*more, strict=True))
            torch._foreach_add_(into, grads, alpha=factor)
        return whole

    def _zero(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        if self._zeros is None or self._zeros.dtype != like.dtype:
            self._zeros = torch.zeros(self._longest, dtype=like.dtype, device=like.device)
        return self._zeros[:numel]

    def forget(self) -> None:
        """Drop all held gradients."""
        self._grads = {}
