"""The steps of optimizers that need full matrices: each parameter is updated by the rank that owns it.

Gradients are averaged and sharded already, as for any other optimizer. In a step each rank sends its shards of parameters and
gradients to their owners, steps on the parameters that it owns, and sends new values back (:mod:`.exchange`). A step has
several parts: while the optimizer works on one, the shards of the next come in and the values of the last go out, so that
only two or three parts are unsharded at a time. The state belongs to the optimizer: full tensors, at the owner only.

An optimizer may hold the parameters of several engines. It goes through the groups of the first engine, as if that were
alone, then through those of the next. The engines are in the order of their first parameters in the optimizer, which all ranks
share. All engines are checked before the first one changes anything.

The optimizer goes through one group for each part. Each begins with the options of the user's group, so that a ``step`` that
counts in them (``group["k"] += 1``) counts once, however many parts there are.

An exception in the arithmetic of one rank (a matrix without a decomposition, say) must not leave the others waiting. That
rank takes part in the exchanges that remain, without stepping, and says so in them: at the end of the step the others raise
too. Asking all ranks before the values of each part go back would cost a message and a wait for each.

Sources: Muon with matrices at their owners, arXiv 2502.16982; DION's reference code, arXiv 2504.05295; Distributed Shampoo,
arXiv 2309.06497.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ..optimizer_proxy import StepBackend
from .engine_step import EngineStep
from .groups import OwnerState

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime

__all__ = ["MatrixStep"]


class MatrixStep(StepBackend):
    """The steps of one optimizer."""

    def __init__(self, optimizer: Any, runtimes: list[Runtime]) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # the key under which the step is kept
        self.runtimes = list(runtimes)
        self._engines = [EngineStep(optimizer, runtime, runtime is runtimes[-1]) for runtime in runtimes]
        self._places: list[tuple[EngineStep, int]] = []  # for each group: its engine, and its number among that one's
        self._at = -1  # the number of the current group; -1 outside a loop over the groups
        self._passed = False  # True when a loop over the groups has come to its end
        self._clear: Callable[[], None] | None = None  # the call of `zero_grad` that follows the step
        self.state = OwnerState({})

    def open(self) -> None:
        self._at, self._passed, self._clear = -1, False, None
        for engine in self._engines:
            engine.check()
        self.state = OwnerState(self._optimizer().state)
        for engine in self._engines:
            engine.begin(self.state)
        self._places = [(engine, i) for engine in self._engines for i in range(len(engine.groups))]

    def groups(self) -> list[dict[str, Any]]:
        return [engine.groups[i].options for engine, i in self._places]

    def begin_group(self, number: int) -> None:
        engine, own = self._places[number]
        if number != self._at + 1:
            raise engine.misuse("began a loop over the groups within another")
        if own == 0:
            engine.left_at = None
            if number:
                self._places[number - 1][0].finish()
        self._at = number
        engine.begin_group(own)

    def end_group(self, number: int) -> None:
        engine, own = self._places[number]
        engine.end_group(own)

    def leave_loop(self, number: int) -> None:
        engine, own = self._places[number]
        engine.leave_loop(own)
        at = self._engines.index(engine)
        for later in self._engines[at + 1 :]:  # other ranks wait in the exchanges of these
            later.leave_loop(-1)
        for earlier in self._engines[:at]:
            earlier.forget_answers()
        self._at, self._passed = -1, True

    def end_loop(self) -> None:
        if self._at == len(self._places) - 1 >= 0:
            self._places[-1][0].finish()
            self._at, self._passed = -1, True
            _call_all(engine.read_answers_on_cpu for engine in self._engines)
        _call_all(engine.raise_error_of_leaving for engine in self._engines)

    def zero_grad(self, stepped: Callable[[], None], users: Callable[[], None]) -> None:
        if self._at >= 0 or not self._passed:
            raise self._engines[-1].misuse("called zero_grad() before the end of its loop over the groups")
        self._clear = users

    def publish(self) -> None:
        self.end_loop()
        _call_all(engine.publish for engine in self._engines)  # all engines, because other ranks do the same
        clear, self._clear = self._clear, None
        if clear is not None:
            clear()

    def close(self) -> None:
        self.publish()
        self._drop()

    def forget(self) -> None:
        for engine in self._engines:
            engine.forget()
        self._at = -1
        self._drop()

    def _drop(self) -> None:
        # A frame may refer to the step, which must not keep an engine alive.
        self._places, self.state = [], OwnerState({})
        for engine in self._engines:
            engine.groups = []


def _call_all(calls: Iterable[Callable[[], None]]) -> None:
    """Call all of the functions, and raise the first error."""
    error: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error
