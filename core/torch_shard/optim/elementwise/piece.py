"""What an element-wise optimizer sees as one parameter."""

from __future__ import annotations

from typing import Any

import torch

from ...numerics.stochastic_rounding import EXACT, Rounding, round_to

__all__ = ["Piece", "RoundedPiece"]


class Piece:
    """A plain 1-D leaf: a part of a shard itself, or a copy of several small parts."""

    __slots__ = ("_parts", "given", "grads", "param", "sizes", "state", "values")

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values  # in the shards
        self.sizes = [v.numel() for v in values]
        # Of its own, as a leaf that wants a gradient: some optimizers ask for that.
        self.param = (values[0].detach() if len(values) == 1 else torch.cat(values)).requires_grad_()
        self.grads: list[torch.Tensor] = list(values)  # what the gradient consists of, set before each step
        self.given: torch.Tensor | None = None  # the gradient with which the step began
        self.state: dict[str, Any] = {}
        self._parts = self._split()

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

    def store(self) -> None:
        """Put the values into the shards, after the arithmetic."""
        if len(self.values) > 1:
            if self.param.data_ptr() != self._parts[0].data_ptr():  # given other memory, by `p.data = ...`
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
        """Return True if the step has replaced or removed the gradient; what is there counts as given from then on."""
        grad = self.param.grad
        if grad is self.given:
            return False
        self.given, self.grads = grad, []
        return True

    def drop(self) -> None:
        """Let go of the gradients."""
        self.param.grad = self.given = None
        self.grads = self.values.copy()


class RoundedPiece(Piece):
    """Parts of bf16 shards. The optimizer works on a copy in fp32, with the gradient in fp32, both of which exist from
    :meth:`enter` to :meth:`drop`; the results are rounded stochastically into the shards."""

    __slots__ = ("_absent", "_sources", "entered")

    def __init__(self, values: list[torch.Tensor], sources: list[tuple[Rounding, int]]) -> None:
        """`sources`: of each part, the random numbers of its flat buffer and where in it the part begins."""
        self.values = values
        self.sizes = [v.numel() for v in values]
        self._sources = sources
        # Of the same shape and with hardly any memory; who computes with it outside a step sees it.
        nothing = torch.full((1,), torch.nan, dtype=EXACT, device=values[0].device)
        self._absent = nothing.expand(sum(self.sizes))
        self.param = self._absent.detach().requires_grad_()
        self.grads = list(values)
        self.given = None
        self.state = {}
        self.entered = False

    def load(self) -> None:
        """Do nothing: :meth:`enter` makes the copies when the optimizer comes to this piece."""

    def enter(self) -> None:
        """Make the copies, before the arithmetic."""
        if self.entered:
            return
        exact = torch.empty(sum(self.sizes), dtype=EXACT, device=self.param.device)
        torch._foreach_copy_(list(exact.split_with_sizes(self.sizes)), self.values)
        grad = self.grads[0] if len(self.grads) == 1 else torch.cat(self.grads)
        self.param.data = exact
        self.param.grad = self.given = grad.to(EXACT)
        self.entered = True

    def store(self) -> None:
        if self.entered:
            round_to(self.values, self.param.detach(), [rounding.at(start) for rounding, start in self._sources])

    def drop(self) -> None:
        super().drop()
        self.param.data = self._absent
        self.entered = False
