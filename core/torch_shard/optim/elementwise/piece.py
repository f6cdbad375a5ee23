"""The plain tensors that an element-wise optimizer gets as its parameters."""

from __future__ import annotations

from typing import Any

import torch

from ...numerics.stochastic_rounding import EXACT, Rounding, round_to


class Piece:
    """One parameter of a step: a plain 1-D leaf over a part of a shard, or a copy of several small parts.

    Attributes:
        values: the parts, in the shards.
        sizes: their numbers of elements.
        param: the leaf.
        grads: the parts of its gradient, set before each step.
        given: the gradient that the leaf had at the beginning of the step.
        state: the optimizer's state of the leaf.
        loaded: True from :meth:`load` to :meth:`drop`.
    """

    __slots__ = ("_parts", "given", "grads", "loaded", "param", "sizes", "state", "values")

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values
        self.sizes = [v.numel() for v in values]
        # A leaf that requires a gradient, because some optimizers ask for that.
        self.param = self._leaf().requires_grad_()
        self.grads: list[torch.Tensor] = list(values)
        self.given: torch.Tensor | None = None
        self.state: dict[str, Any] = {}
        self.loaded = False
        self._parts = self._split()

    def _leaf(self) -> torch.Tensor:
        return self.values[0].detach() if len(self.values) == 1 else torch.cat(self.values)

    def _split(self) -> tuple[torch.Tensor, ...]:
        return self.param.detach().split_with_sizes(self.sizes) if len(self.values) > 1 else ()

    def load(self) -> None:
        """Take values and gradients, before the arithmetic."""
        if len(self.values) == 1:
            grad = self.grads[0]
        else:
            torch.cat(self.values, out=self.param)
            grad = torch.cat(self.grads)
        # Gradients may have been kept in low precision, which optimizers don't take.
        self.param.grad = self.given = grad.to(self.param.dtype)
        self.loaded = True

    def store(self) -> None:
        """Put the values into the shards, after the arithmetic."""
        if len(self.values) > 1:
            if self.param.data_ptr() != self._parts[0].data_ptr():  # after `p.data = ...`
                self._parts = self._split()
            torch._foreach_copy_(self.values, self._parts)
        elif self.param.data_ptr() != self.values[0].data_ptr():
            self.values[0].copy_(self.param)
            self.param.data = self.values[0]

    def store_gradient(self) -> None:
        """Put the gradient into the shards, where the step may have changed it in place."""
        # Whether it has can't be asked: a write through `.data` moves no version, and fused kernels move it always.
        if self.given is not None and self.grads and self.given is not self.grads[0]:
            torch._foreach_copy_(self.grads, self.given.split_with_sizes([grad.numel() for grad in self.grads]))

    def take_gradient(self) -> bool:
        """Return True if the step has replaced or removed the gradient, and note the new one as given."""
        grad = self.param.grad
        if grad is self.given:
            return False
        self.given, self.grads = grad, []
        return True

    def drop(self) -> None:
        """Drop the gradients, at the end of the step."""
        self.param.grad = self.given = None
        self.grads = self.values.copy()
        self.loaded = False


class RoundedPiece(Piece):
    """A piece over parts of bf16 shards.

    From :meth:`load` to :meth:`drop` the leaf is a copy in fp32, with a gradient in fp32. The results are rounded
    stochastically into the shards.
    """

    __slots__ = ("_absent", "_sources")

    def __init__(self, values: list[torch.Tensor], sources: list[tuple[Rounding, int]]) -> None:
        """Make the piece. `sources` has each part's source of random numbers, and the position at which the part begins."""
        self._sources = sources
        # A placeholder of the same shape with almost no memory. Arithmetic with it outside a step gives NaN.
        nothing = torch.full((1,), torch.nan, dtype=EXACT, device=values[0].device)
        self._absent = nothing.expand(sum(v.numel() for v in values))
        super().__init__(values)

    def _leaf(self) -> torch.Tensor:
        return self._absent.detach()

    def _split(self) -> tuple[torch.Tensor, ...]:
        return ()

    def load(self) -> None:
        exact = torch.empty(sum(self.sizes), dtype=EXACT, device=self.param.device)
        torch._foreach_copy_(list(exact.split_with_sizes(self.sizes)), self.values)
        grad = self.grads[0] if len(self.grads) == 1 else torch.cat(self.grads)
        self.param.data = exact
        self.param.grad = self.given = grad.to(EXACT)
        self.loaded = True

    def store(self) -> None:
        round_to(self.values, self.param.detach(), [rounding.at(start) for rounding, start in self._sources])

    def drop(self) -> None:
        super().drop()
        self.param.data = self._absent
