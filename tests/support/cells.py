"""Models that use small units in any order, the order of their collectives, and what the reference says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import nn

import torch_shard
from tests.support.collectives import Collectives
from tests.support.reference import Order, Param, Use, flat_buffers, lay_out

WIDTH = 4
ITEM = 8  # bytes of a float64
KINDS = ("trainable", "frozen", "half frozen", "bias")


@dataclass(frozen=True)
class Pass:
    """A forward, with a backward unless it evaluates.

    Attributes:
        cells: their numbers, in the order in which they are used.
        detached: for each of these uses, the ranks on which the loss does not depend on it.
        evaluates: without gradients.
    """

    cells: tuple[int, ...]
    detached: tuple[tuple[int, ...], ...]
    evaluates: bool = False


@dataclass(frozen=True)
class Case:
    """Cells by kind, and passes over them one after the other."""

    kinds: tuple[str, ...]
    passes: tuple[Pass, ...]
    prefetch: int = 1
    strategy: str = "full_shard"


class Cell(nn.Module):
    """A unit. The flat buffers of one model's cells have different sizes, by which their messages are told apart."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        hidden = 16 + 2 * number
        if kind == "bias":  # backward needs no value of it
            self.bias = nn.Parameter(torch.linspace(-0.5, 0.5, (2 * hidden + 1) * WIDTH, dtype=torch.float64))
            return
        self.inp = nn.Parameter(torch.linspace(-0.5, 0.4, WIDTH * hidden, dtype=torch.float64).view(WIDTH, hidden))
        self.out = nn.Parameter(torch.linspace(-0.4, 0.6, WIDTH * hidden, dtype=torch.float64).view(hidden, WIDTH))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH, dtype=torch.float64))
        for p in (self.inp, self.out, self.shift):
            p.requires_grad_(kind == "trainable" or (kind == "half frozen" and p is not self.inp))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "bias"):
            return self.bias.view(-1, WIDTH).sum(0).expand(x.shape)
        return torch.tanh(x @ self.inp) @ self.out + self.shift


class Cells(nn.Module):
    """Adds what cells make of it to its input."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.cells = nn.ModuleList([Cell(number, kind) for number, kind in enumerate(kinds)])

    def forward(self, x: torch.Tensor, run: Pass, rank: int) -> torch.Tensor:
        for cell, detached in zip(run.cells, run.detached, strict=True):
            y = self.cells[cell](x)
            x = x + (y.detach() if rank in detached else y)
        return x


@st.composite
def cases(draw: st.DrawFn, ranks: int, chosen: Sequence[str] = KINDS, **fixed: str) -> Case:
    """Draw cells, and passes over them: mostly one that comes again, since it is then that units are gathered ahead."""
    kinds = tuple(draw(st.lists(st.sampled_from(chosen), min_size=1, max_size=5)))
    everyone = tuple(range(ranks))

    def one_pass(cells: tuple[int, ...] = ()) -> Pass:
        cells = cells or tuple(draw(st.lists(st.integers(0, len(kinds) - 1), min_size=2, max_size=7)))
        detached = [draw(st.sampled_from([(), (), (), everyone])) for _ in cells]
        for n, cell in enumerate(cells):
            if kinds[cell] == "bias":  # which backward gathers nothing for, so that ranks may differ
                detached[n] = draw(st.sampled_from([(), everyone, everyone[:1], everyone[1:]]))
        # An engine does not see a backward that reaches none of its units.
        detached[draw(st.integers(0, len(cells) - 1))] = ()
        needed = [cell if kinds[cell] != "bias" and d == () else None for cell, d in zip(cells, detached, strict=True)]
        for n in range(len(cells)):
            before = [cell for cell in needed[:n] if cell is not None][-1:]
            if before == [cell for cell in needed[n:] if cell is not None][:1] and detached[n] != everyone:
                # Between two uses of one other cell ranks must not differ: those that come here release that cell.
                detached[n] = ()
        return Pass(cells, tuple(detached), draw(st.integers(0, 5)) == 0)

    some = [first := one_pass()]
    if draw(st.booleans()):
        some.append(one_pass(draw(st.sampled_from([(), first.cells]))))
    passes = draw(st.lists(st.sampled_from(some), min_size=3, max_size=5))
    return Case(kinds, tuple(passes), draw(st.integers(0, 2)), **fixed)


@st.composite
def branches(draw: st.DrawFn, ranks: int) -> Case:
    """Draw cells that are used once in each pass, and after two passes are in the loss of some ranks only.

    Of the last one, and of a cell that was in no rank's loss in between, the engine would not know that other ranks need it.
    """
    count = draw(st.integers(2, 5))
    cells = tuple(draw(st.permutations(range(count))))
    whole = Pass(cells, ((),) * count)
    not_everyone = st.sets(st.integers(0, ranks - 1), max_size=ranks - 1).map(lambda some: tuple(sorted(some)))
    detached = st.lists(not_everyone, min_size=count - 1, max_size=count - 1)
    passes = [Pass(cells, (*some, ())) for some in draw(st.lists(detached, min_size=1, max_size=3))]
    return Case(("trainable",) * count, (whole, whole, *passes, whole), draw(st.integers(0, 3)))


def record(rank: int, world_size: int, case: Case) -> list[tuple[list[int], list[int]]]:
    """Run a case on a rank: for each pass the bytes of its gathers and those of its reductions, in order."""
    found = []
    for seen in run_passes(rank, case, Collectives):
        gathers = [nbytes for _, nbytes, _, _ in seen.named("broadcast_")][::world_size]  # each rank's shard is one
        found.append((gathers, [nbytes for _, nbytes, _, _ in seen.named("alltoall_base_")]))
    return found


Seen = TypeVar("Seen", bound=contextlib.AbstractContextManager[Any])


def run_passes(rank: int, case: Case, watch: Callable[[], Seen], **settings: Any) -> Iterator[Seen]:
    """Run a case on a rank, each pass within a context that `watch` makes, and yield these."""
    model = Cells(case.kinds)
    # A rank that is late, on a busy machine, must not make another one evaluate alone, without a collective.
    settings = {"prefetch": case.prefetch, "strategy": case.strategy, "timeout": 10.0, "alone_after": 10.0, **settings}
    torch_shard.shard(model, units=["cells.*"], **settings)
    for run in case.passes:
        # The input takes a gradient, so that backward needs the values of every cell that it reaches.
        x = torch.ones(2, WIDTH, dtype=torch.float64, requires_grad=True)
        with watch() as seen, torch.no_grad() if run.evaluates else contextlib.nullcontext():
            loss = model(x, run, rank).sum()
            if not run.evaluates:
                loss.backward()
        yield seen


def predict(case: Case, ranks: int) -> list[tuple[list[int], list[int]]]:
    """Return what the reference says that :func:`record` finds."""
    cells = [Cell(number, kind) for number, kind in enumerate(case.kinds)]
    trainable = {number for number, kind in enumerate(case.kinds) if kind != "frozen"}
    order = Order(case.prefetch, keeps=case.strategy == "shard_grad_op")
    found = []
    for run in case.passes:
        gathers = order.gathers_of_forward(run.cells, "evaluation" if run.evaluates else "forward")
        reductions: list[int] = []
        if not run.evaluates:
            uses = [
                Use(cell, saves=case.kinds[cell] != "bias", reached=len(detached) < ranks)
                for cell, detached in zip(run.cells, run.detached, strict=True)
            ]
            gathers = gathers + order.gathers_of_backward(uses, len(cells))
            reached = {use.unit for use in uses if use.reached}
            reductions = order.reductions(uses, wants=trainable, gradients=reached & trainable)
        gathered = [nbytes // ranks for unit in gathers for nbytes, _ in sizes(cells[unit], ranks)]
        found.append(
            (gathered, [nbytes for unit in reductions for nbytes, wants in sizes(cells[unit], ranks) if wants])
        )
    return found


def sizes(cell: Cell, ranks: int) -> list[tuple[int, bool]]:
    """Return the bytes of a cell's flat buffers, and whether they are trainable."""
    params = [Param(name, tuple(p.shape), p.stride(), p.dtype, p.requires_grad) for name, p in cell.named_parameters()]
    return [(len(lay_out(flat, ITEM, ranks)) * ITEM, flat[0].trainable) for flat in flat_buffers(params)]
