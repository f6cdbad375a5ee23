"""The steps of optimizers that need whole matrices: each parameter is updated by the rank that owns it.

Gradients are averaged and cut already, as for any other optimizer. In a step each rank sends the slices of parameters and
gradients to their owners, steps on what it owns, and sends new values back (:mod:`.exchange`). That goes part by part:
while one is worked on, the next one's slices come in and the last one's values go out, so that only two or three parts are
whole at a time. State is the optimizer's own: whole tensors, at the owner only.

Of an optimizer that holds several engines' parameters each engine has its part of the step, as if it were alone; the optimizer
goes through the groups of the first one's, then through those of the next. The order is that of their first parameters in the
optimizer, which all ranks share. All are checked before the first one changes anything.

The optimizer goes through one group for each part. Each begins with the options of the user's group, so that a ``step`` that
counts in them (``group["k"] += 1``) counts once, however many parts there are.

An exception in the arithmetic of one rank (a matrix without a decomposition, say) must not leave the others waiting. That
rank takes part in the exchanges that remain, without stepping, and says so in them: at the end of the step the others raise
too. Asking all ranks before each part goes back would cost a message and a wait for each.

Sources: Muon with matrices at their owners, arXiv 2502.16982; DION's reference code, arXiv 2504.05295; Distributed Shampoo,
arXiv 2309.06497.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...errors import ShardError
from ..optimizer_proxy import Work
from .engine_step import EngineStep
from .groups import OwnState

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime

__all__ = ["MatrixStep"]


class MatrixStep(Work):
    """The steps of one optimizer."""

    def __init__(self, optimizer: Any, runtimes: list[Runtime]) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self.runtimes = list(runtimes)
        self._engines = [EngineStep(optimizer, runtime, runtime is runtimes[-1]) for runtime in runtimes]
        self._places: list[tuple[EngineStep, int]] = []  # of each group: whose, and the number among those
        self._at = -1  # the group that is worked on; -1: the parameters are as the last pass has left them
        self._passed = False  # a loop over the groups has come to its end
        self._clear: Callable[[], None] | None = None  # `zero_grad` was called
        self.state = OwnState({})

    def open(self) -> None:
        self._at, self._passed, self._clear = -1, False, None
        self._refuse_other_ranks()
        for engine in self._engines:
            engine.check()
        self.state = OwnState(self._optimizer().state)
        for engine in self._engines:
            engine.begin(self.state)
        self._places = [(engine, i) for engine in self._engines for i in range(len(engine.working))]

    def _refuse_other_ranks(self) -> None:
        first, *others = [runtime.collectives.watchdog.ranks for runtime in self.runtimes]
        if any(list(ranks) != list(first) for ranks in others):
            name, rank = type(self._optimizer()).__name__, self.runtimes[0].collectives.world_rank
            raise ShardError(
                f"rank {rank}: {name}.step() works on whole matrices of {len(self.runtimes)} sharded models, whose ranks "
                "differ, so that a failure would not be known to all of them. Make an optimizer for each model. Nothing was "
                "changed."
            )

    def groups(self) -> list[dict[str, Any]]:
        return [engine.working[i].options for engine, i in self._places]

    def before(self, number: int) -> None:
        engine, own = self._places[number]
        if number != self._at + 1:
            raise engine.other_way("began a loop over the groups within another")
        if own == 0:
            engine.left_at = None
            if number:
                self._places[number - 1][0].finish()
        self._at = number
        engine.come_to(own)

    def after(self, number: int) -> None:
        engine, own = self._places[number]
        engine.go_on_from(own)

    def leave(self, number: int) -> None:
        engine, own = self._places[number]
        engine.leave(own)
        at = self._engines.index(engine)
        for later in self._engines[at + 1 :]:  # in whose exchanges other ranks wait
            later.leave(-1)
        for earlier in self._engines[:at]:
            earlier.ignore()
        self._at, self._passed = -1, True

    def through(self) -> None:
        if self._at == len(self._places) - 1 >= 0:
            self._places[-1][0].finish()
            self._at, self._passed = -1, True
            _each(engine.hear_at_once for engine in self._engines)
        _each(engine.raise_what_leaving_met for engine in self._engines)

    def zero_grad(self, given: Callable[[], None], users: Callable[[], None]) -> None:
        if self._at >= 0 or not self._passed:
            raise self._engines[-1].other_way("called zero_grad() before the end of its loop over the groups")
        self._clear = users

    def pause(self) -> None:
        self.through()
        # All of them, because other ranks do the same.
        _each(functools.partial(engine.pause, self._passed) for engine in self._engines)
        clear, self._clear = self._clear, None
        if clear is not None:
            clear()

    def close(self) -> None:
        self.pause()
        self._let_go()

    def forget(self) -> None:
        for engine in self._engines:
            engine.forget()
        self._at = -1
        self._let_go()

    def _let_go(self) -> None:
        # What these refer to shall not outlive an engine because a frame refers to the step.
        self._places, self.state = [], OwnState({})
        for engine in self._engines:
            engine.working = []


def _each(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of them, and raise the first error."""
    error: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error
