"""Steps on whole matrices by one optimizer that holds the parameters of several engines.

Each engine has its part of the step, with owners, exchanges and state as if it were alone; the optimizer goes through the
groups of the first engine's part, then through those of the next. The engines' order is that of their first parameters in
the optimizer, which all ranks share. All of them are checked before the first one changes anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import ShardError
from .groups import OwnState
from .step import MatrixStep, other_way

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime

__all__ = ["MatrixSteps"]


class MatrixSteps:
    """The steps of one optimizer; see :class:`~torch_shard.optim.optimizer_proxy.Work`."""

    def __init__(self, optimizer: Any, runtimes: Sequence[Runtime]) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # by which this is found
        self._name = type(optimizer).__name__
        self.runtimes = list(runtimes)
        self._steps = [MatrixStep(optimizer, runtime, runtime is self.runtimes[-1]) for runtime in self.runtimes]
        self._places: list[tuple[int, int]] = []  # of each group: whose, and the number among those
        self._at = -1  # the group that is worked on

    @property
    def state(self) -> Any:
        return self._steps[0].state

    # -- before the arithmetic ------------------------------------------------------------------------------------
    def open(self) -> None:
        self._at = -1
        self._refuse_other_ranks()
        for step in self._steps:
            step.check()
        for step in self._steps:
            step.begin()
        shared = OwnState(self._optimizer().state)
        for step in self._steps:
            step.state = shared
        self._places = [(n, i) for n, step in enumerate(self._steps) for i in range(len(step.groups()))]

    def _refuse_other_ranks(self) -> None:
        first, *others = [runtime.collectives.watch.ranks for runtime in self.runtimes]
        if any(list(ranks) != list(first) for ranks in others):
            rank = self.runtimes[0].collectives.world_rank
            raise ShardError(
                f"rank {rank}: {self._name}.step() works on whole matrices of {len(self.runtimes)} sharded models, whose ranks "
                "differ, so that a failure would not be known to all of them. Make an optimizer for each model. Nothing was "
                "changed."
            )

    # -- for the optimizer ----------------------------------------------------------------------------------------
    def groups(self) -> list[dict[str, Any]]:
        return [group for step in self._steps for group in step.groups()]

    def before(self, number: int) -> None:
        if number != self._at + 1:
            raise other_way(
                self._name, self.runtimes[0].collectives.world_rank, "began a loop over the groups within another"
            )
        whose, own = self._places[number]
        if own == 0 and whose:
            self._steps[whose - 1].finish()
        self._at = number
        self._steps[whose].before(own)

    def after(self, number: int) -> None:
        whose, own = self._places[number]
        self._steps[whose].after(own)

    def leave(self, number: int) -> None:
        whose, own = self._places[number]
        self._steps[whose].leave(own)
        for step in self._steps[whose + 1 :]:  # in whose exchanges other ranks wait
            step.leave(-1)
        for step in self._steps[:whose]:
            step.ignore()
        self._at = -1

    def through(self) -> None:
        if self._at == len(self._places) - 1 >= 0:
            self._steps[-1].finish()
            self._at = -1
            _each([step.hear_at_once for step in self._steps])
        _each([step.through for step in self._steps])

    def zero_grad(self, given: Callable[[], None], users: Callable[[], None]) -> None:
        # Clearing what is cleared does nothing; and the others say where it can't be done yet.
        waiting = [step for step in self._steps if not step.has_passed]
        (waiting or self._steps)[-1].zero_grad(given, users)

    def forget(self) -> None:
        """State has been loaded: nothing of what there was is kept."""
        for step in self._steps:
            step.forget()
        self._at = -1

    def pause(self) -> None:
        self.through()
        # All of them, because other ranks do the same.
        _each([step.pause for step in self._steps])

    def close(self) -> None:
        self.through()
        _each([step.close for step in self._steps])


def _each(calls: Sequence[Callable[[], None]]) -> None:
    """Call all of them, and raise the first error."""
    error: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as problem:
            error = error or problem
    if error is not None:
        raise error
