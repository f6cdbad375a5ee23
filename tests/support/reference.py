"""The engine in slow motion: what sharded training computes, holds and sends, in the most obvious code.

One process plays all ranks: a list has one entry for each rank, and what ranks send each other is an assignment. Nothing here
is fast, nothing runs at the same time as anything else, and nothing is shared with ``torch_shard``. The tests in the files
``test_*against_reference.py`` hold the real engine to it, so this is its specification in short. Read it from top to bottom:

===================================  ==================================================================================
``flat_buffers``                     which parameters of a unit share a flat buffer, and in which order
``lay_out``, ``cut_evenly``          where each element lies in it, and which part of it each rank holds
``Order``                            which unit is gathered when, and whose gradients are reduced when
``ReferenceEngine``                  a training step: forward on full parameters, mean of the gradients, step on shards
``ReferenceEngine.step_on_matrices`` a step on whole matrices at their owners
===================================  ==================================================================================

Offload changes no number and no order: a rank copies its shard of a unit to the device for each gather, and its shard of a
reduced gradient to host memory for each reduction.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# -- layout -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Param:
    """A parameter as the layout sees it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype = torch.float64
    trainable: bool = True


Element = tuple[str, tuple[int, ...]] | None
"""One element of a flat buffer: of which parameter, and its index there. None: padding."""


def flat_buffers(params: Iterable[Param]) -> list[list[Param]]:
    """Return the flat buffers of a unit: trainable parameters apart from frozen ones, and each dtype by itself; in each of them
    matrices before vectors, else as registered."""
    kinds: dict[tuple[bool, str], list[Param]] = {}
    for p in sorted(params, key=lambda p: (not p.trainable, str(p.dtype), len(p.shape) < 2)):
        kinds.setdefault((p.trainable, str(p.dtype)), []).append(p)
    return list(kinds.values())


def elements(shape: Sequence[int], stride: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the indices of all elements of a tensor in memory order."""
    indices = itertools.product(*map(range, shape))
    return sorted(indices, key=lambda index: sum(i * step for i, step in zip(index, stride, strict=True)))


def lay_out(params: Iterable[Param], itemsize: int, ranks: int) -> list[Element]:
    """Return a flat buffer element by element: each parameter in its memory order from a multiple of 16 bytes on, and padding so
    that every rank gets the same number of elements, of which the bytes are a multiple of 16, too."""
    buffer: list[Element] = []
    for p in params:
        while len(buffer) * itemsize % 16:
            buffer.append(None)
        buffer += [(p.name, index) for index in elements(p.shape, p.stride)]
    while len(buffer) % ranks or len(buffer) // ranks * itemsize % 16:
        buffer.append(None)
    return buffer


def cut_evenly(buffer: Any, ranks: int) -> list[Any]:
    """Return what each rank holds of a flat buffer (a list or a 1-D tensor): the first rank the first part, and so on."""
    size = len(buffer) // ranks
    return [buffer[rank * size : (rank + 1) * size] for rank in range(ranks)]


# -- order --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Use:
    """One forward of a unit.

    Attributes:
        unit: its number.
        saves: autograd keeps values of the unit's parameters for backward, which therefore needs the unit gathered.
        reached: backward comes back to it.
    """

    unit: int
    saves: bool = True
    reached: bool = True


class Order:
    """In which order all ranks must gather units and reduce gradients, over any number of steps.

    A unit is gathered when it is needed, and so are the `prefetch` units that are likely to come next: those that came next when
    the same two units were used one after the other last. Of what is gathered, a forward keeps only that. Where backward comes
    to a unit, the units that it has come to before are released. Where it leaves units out that came before this one last time,
    they are gathered all the same, because another rank may need them.
    """

    def __init__(self, prefetch: int = 1, keeps: bool = False) -> None:
        """`keeps`: parameters stay gathered from forward to the end of backward (``shard_grad_op``)."""
        self.prefetch, self.keeps = prefetch, keeps
        self.past: list[Any] = [None, None]  # every (phase, unit, whether it began the phase) since the first step
        self.held: set[int] = set()  # units that are gathered now
        self.gathered: list[int] = []  # in the pass that runs
        self.without_gradient: set[int] = set()  # units that no rank had a gradient of when they were used last

    def gathers_of_forward(self, units: Sequence[int], phase: str = "forward") -> list[int]:
        """Return the gathers of a forward that uses `units` in this order; `phase` is "evaluation" without gradients."""
        self.held, self.gathered = set(), []
        for n, unit in enumerate(units):
            if n and unit == units[n - 1]:
                continue  # it is still there
            self.past.append((phase, unit, n == 0))
            ahead = self._ahead(phase)
            if not (self.keeps and phase == "forward"):
                self.held &= {unit, *ahead}
            self._gather([unit, *ahead])
        return self.gathered

    def gathers_of_backward(self, uses: Sequence[Use], units: int) -> list[int]:
        """Return the gathers of the backward of a forward that had these uses, in the forward's order; `units` is how many units
        the model has."""
        self.gathered = []
        begun: set[int] = set()  # units to which backward has come, and which are not released since
        passed: set[int] = set()
        needed: list[int] = []
        for use in reversed([use for use in uses if use.reached]):
            if not self.keeps:
                self.held -= (begun | passed) - {use.unit}
                begun &= {use.unit}
            begun.add(use.unit)
            if not use.saves:
                continue
            ahead = []
            if not needed or needed[-1] != use.unit:
                event = ("backward", use.unit, not needed)
                if needed:
                    passed |= self._pass_over(event, units)
                self.past.append(event)
                ahead = self._ahead("backward")
            needed.append(use.unit)
            self._gather([use.unit, *ahead])
        if needed:
            passed |= self._pass_over(None, units)
        if passed - set(needed):  # nobody needs them any more: forget what came after what
            self.past = [None, None]
        self.held = set()
        return self.gathered

    def reductions(self, uses: Sequence[Use], wants: Iterable[int], gradients: Iterable[int]) -> list[int]:
        """Return the reductions of a backward: in the reverse order of first use, but units that had no gradient the last time
        come last, where they keep no others waiting.

        Args:
            uses: of the forward, in its order.
            wants: units with a trainable parameter.
            gradients: units that have a gradient on any rank.
        """
        first_uses = dict.fromkeys(use.unit for use in uses if use.unit in set(wants))
        backwards = list(first_uses)[::-1]
        backwards.sort(key=lambda unit: unit in self.without_gradient)  # which keeps the order of equals
        self.without_gradient -= set(first_uses)
        self.without_gradient |= set(first_uses) - set(gradients)
        return [unit for unit in backwards if unit in set(gradients)]

    def _gather(self, units: Iterable[int]) -> None:
        for unit in units:
            if unit not in self.held:
                self.held.add(unit)
                self.gathered.append(unit)

    def _next(self, first: Any, second: Any) -> Any:
        """Return what came next when these two came one after the other last; None if they never have."""
        for n in reversed(range(len(self.past) - 2)):
            if self.past[n : n + 2] == [first, second]:
                return self.past[n + 2]
        return None

    def _ahead(self, phase: str) -> list[int]:
        """Return the units that are likely to come next in this phase."""
        first, second = self.past[-2:]
        found: list[int] = []
        while len(found) < self.prefetch:
            first, second = second, self._next(first, second)
            if second is None or second[0] != phase or second[2]:
                break
            found.append(second[1])
        return found

    def _pass_over(self, until: Any, units: int) -> set[int]:
        """Gather what backward came to last time before it came to `until`, or to its end (None). Not if that is not what it came
        to, nor over more events than there are units. Return the units."""
        events: list[Any] = []
        first, second = self.past[-2:]
        while len(events) <= units:
            first, second = second, self._next(first, second)
            ended = second is None or second[0] != "backward" or second[2]
            if ended or second == until:
                found = events if not ended or until is None else []
                self.past += found
                self._gather(event[1] for event in found)
                return {event[1] for event in found}
            events.append(second)
        return set()


# -- a training step ----------------------------------------------------------------------------------------------------

Update = Callable[[torch.Tensor, torch.Tensor, dict[str, Any]], None]
"""Changes a value in place, by its gradient and its state (empty at first)."""


class ReferenceEngine:
    """Trains a model on so many simulated ranks.

    Attributes:
        model: what computes; its parameters are only right between :meth:`gather` and the next step.
        shards: for each flat buffer what each rank holds of it, a 1-D tensor.
        gradients: the same of the mean gradient, zero where there is none.
        has_gradient: names of the parameters that have a gradient.
    """

    def __init__(self, model: nn.Module, units: Sequence[Sequence[str]], ranks: int, replicas: int = 1) -> None:
        """`units`: names of their parameters; `replicas`: so many equal groups of consecutive ranks hold everything each."""
        self.model, self.ranks, self.size = copy.deepcopy(model), ranks, ranks // replicas
        self.parameters = dict(self.model.named_parameters())
        self.layouts: list[list[Element]] = []
        self.states: dict[tuple[str, int], dict[str, Any]] = {}  # by parameter and rank
        for names in units:
            for params in flat_buffers(map(self._param, names)):
                self.layouts.append(lay_out(params, params[0].dtype.itemsize, self.size))
        self.shards = self._cut({name: p.detach() for name, p in self.parameters.items()})
        self.zero_grad()

    def _param(self, name: str) -> Param:
        p = self.parameters[name]
        return Param(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.gradients = self._cut({})
        self.has_gradient: set[str] = set()

    def _cut(self, tensors: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return each rank's part of flat buffers with these values, zero where there are none."""
        found = []
        for layout in self.layouts:
            values = [tensors[e[0]][e[1]].item() if e and e[0] in tensors else 0.0 for e in layout]
            parts = cut_evenly(torch.tensor(values, dtype=self._dtype(layout)), self.size)
            found.append([parts[rank % self.size].clone() for rank in range(self.ranks)])
        return found

    def _dtype(self, layout: list[Element]) -> torch.dtype:
        names = [element[0] for element in layout if element]
        return self.parameters[names[0]].dtype if names else torch.float64

    def places(self, rank: int) -> dict[str, tuple[int, slice]]:
        """Return, for each parameter of which `rank` holds something, the number of the flat buffer and where in the rank's shard
        of it that lies."""
        found: dict[str, tuple[int, slice]] = {}
        for number, layout in enumerate(self.layouts):
            names = [element[0] if element else None for element in cut_evenly(layout, self.size)[rank % self.size]]
            for name in dict.fromkeys(names):
                if name is not None:
                    start = names.index(name)
                    found[name] = number, slice(start, start + names.count(name))
        return found

    def held_by(self, rank: int) -> dict[str, torch.Tensor]:
        """Return what `rank` holds of each parameter: a 1-D tensor, which may be empty."""
        places = self.places(rank)
        empty = {name: p.detach().flatten()[:0] for name, p in self.parameters.items()}
        return empty | {name: self.shards[number][rank][own] for name, (number, own) in places.items()}

    def gather(self) -> None:
        """Fill the model's parameters with what the ranks hold."""
        with torch.no_grad():
            for layout, shards in zip(self.layouts, self.shards, strict=True):
                for element, value in zip(layout, torch.cat(shards[: self.size]).tolist(), strict=True):
                    if element:
                        name, index = element
                        self.parameters[name][index] = value

    def backward(self, loss_of: Callable[[nn.Module, int], torch.Tensor]) -> None:
        """Add the mean over the ranks of the gradients of ``loss_of(model, rank)`` to what there is; a rank without a gradient
        counts as one with zeros, where another rank has one."""
        self.gather()
        total: dict[str, torch.Tensor] = {}
        for rank in range(self.ranks):
            self.model.zero_grad()
            loss_of(self.model, rank).backward()
            for name, p in self.parameters.items():
                if p.grad is not None:
                    total[name] = total.get(name, torch.zeros_like(p)) + p.grad
        mean = self._cut({name: grad / self.ranks for name, grad in total.items()})
        for held, new in zip(self.gradients, mean, strict=True):
            for own, more in zip(held, new, strict=True):
                own.add_(more)
        self.has_gradient |= set(total)

    def clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm, taken over the ranks of one replica, is no larger; return what it was."""
        norm = math.sqrt(sum((part**2).sum().item() for held in self.gradients for part in held[: self.size]))
        for part in itertools.chain(*self.gradients):
            part.mul_(min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def step(self, update: Update, names: Iterable[str] | None = None) -> None:
        """Have each rank update what it holds of the parameters `names` (all by default) that have a gradient."""
        for rank in range(self.ranks):
            for name, (number, own) in self.places(rank).items():
                if name in self.has_gradient and (names is None or name in names):
                    state = self.states.setdefault((name, rank), {})
                    update(self.shards[number][rank][own], self.gradients[number][rank][own], state)

    def step_on_matrices(self, update: Update, owners: Mapping[str, int]) -> list[int]:
        """Have the owner of each parameter update all of it; return how many bytes each rank sends.

        The other ranks send their parts of the value and of the gradient to the owner, which sends their parts of the new value
        back. A rank sends each other rank one message each way, of a size rounded up to 16 bytes. The ones that go back end with
        16 bytes that say how the owner's step has ended.
        """
        there, back = torch.zeros(2, self.ranks, self.ranks, dtype=torch.int64)  # bytes by sender and receiver
        for name in [name for name in owners if name in self.has_gradient]:
            owner, p = owners[name], self.parameters[name]
            parts = [(rank, *self.places(rank)[name]) for rank in range(self.ranks) if name in self.places(rank)]
            value = torch.cat([self.shards[number][rank][own] for rank, number, own in parts])
            grad = torch.cat([self.gradients[number][rank][own] for rank, number, own in parts])
            state = self.states.setdefault((name, owner), {})
            update(value.as_strided(p.shape, p.stride()), grad.as_strided(p.shape, p.stride()), state)
            for rank, number, own in parts:
                part = self.shards[number][rank][own]
                part.copy_(value[: len(part)])
                value = value[len(part) :]
                there[rank, owner] += 2 * part.nbytes
                back[owner, rank] += part.nbytes
        sent = (there + 15) // 16 * 16 + (back + 15) // 16 * 16 + 16
        return [sum(row) - row[rank] for rank, row in enumerate(sent.tolist())]  # nothing to itself


def work_on_matrix(rows: int, columns: int) -> int:
    """Return the cost of a step on a matrix: a product with its smaller side.

    Any owners give the same numbers. They are chosen so that no rank has more work than the mean and one matrix.
    """
    return rows * columns * (min(rows, columns) + 1)


# -- optimizers ---------------------------------------------------------------------------------------------------------


def sgd(
    value: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    lr: float,
    momentum: float = 0,
    weight_decay: float = 0,
) -> None:
    """Stochastic gradient descent with momentum, as ``torch.optim.SGD`` has it."""
    grad = grad + weight_decay * value
    state["momentum"] = momentum * state["momentum"] + grad if "momentum" in state else grad
    value -= lr * state["momentum"]


def adamw(
    value: torch.Tensor,
    grad: torch.Tensor,
    state: dict[str, Any],
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:
    """AdamW, arXiv 1711.05101."""
    state["step"] = step = state.get("step", 0) + 1
    state["mean"] = mean = betas[0] * state.get("mean", 0.0) + (1 - betas[0]) * grad
    state["square"] = square = betas[1] * state.get("square", 0.0) + (1 - betas[1]) * grad**2
    value *= 1 - lr * weight_decay
    value -= lr * (mean / (1 - betas[0] ** step)) / ((square / (1 - betas[1] ** step)).sqrt() + eps)


def muon(
    value: torch.Tensor, grad: torch.Tensor, state: dict[str, Any], lr: float, momentum: float = 0.9, rounds: int = 4
) -> None:
    """Momentum made nearly orthogonal by the textbook's Newton-Schulz iteration; needs whole matrices."""
    state["momentum"] = momentum * state.get("momentum", 0.0) + grad
    x = state["momentum"] / (state["momentum"].norm() + 1e-6)
    for _ in range(rounds):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    value -= lr * x
