"""The steps of optimizers that need full matrices: each parameter is updated by the rank that owns it.

Gradients are averaged and sharded already, as for any other optimizer. In a step each rank sends its shards of parameters and
gradients to their owners, steps on the parameters that it owns, and sends new values back (:mod:`.exchange`). A step has
several parts: while the optimizer works on one, the shards of the next come in and the values of the last go out, so that
only two or three parts are unsharded at a time. The state belongs to the optimizer: full tensors, at the owner only.

An optimizer may hold the parameters of several engines. It goes through the parts of the first engine, then through those of
the next. The engines are in the order of their first parameters in the optimizer, which all ranks share. All engines are checked
before the first one changes anything.

The optimizer goes through one group for each part. Each begins with the options of the user's group, so that a ``step`` that
counts in them (``group["k"] += 1``) counts once, however many parts there are.

An exception in the arithmetic of one rank (a matrix without a decomposition, say) must not leave the others waiting. That
rank takes part in the exchanges that remain, without stepping, and says so in them: at the end of the step the others raise
too. Asking all ranks before the values of each part go back would cost a message and a wait for each.

Sources: Muon with matrices at their owners, arXiv 2502.16982; DION's reference code, arXiv 2504.05295; Distributed Shampoo,
arXiv 2309.06497.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ShardError
from ..optimizer_proxy import StepBackend
from .engine_parts import EngineParts
from .groups import OwnerState, PartGroup

if TYPE_CHECKING:
    from ...runtime.runtime import Runtime


class MatrixStep(StepBackend):
    """The steps of one optimizer."""

    def __init__(self, optimizer: Any, runtimes: list[Runtime]) -> None:
        self._optimizer: Any = weakref.ref(optimizer)  # the key under which the step is kept
        self._name = type(optimizer).__name__
        self.runtimes = list(runtimes)
        self._engines = [EngineParts(optimizer, runtime, runtime is runtimes[-1]) for runtime in runtimes]
        self._groups: list[PartGroup] = []
        self._at = -1  # the number of the current group; -1 outside a loop over the groups
        self._passed = False  # True when a loop over the groups has come to its end
        self._left_at: int | None = None  # the number of the group in which the loop was left
        self._answers: list[tuple[int, torch.Tensor]] = []  # rank, and whether it has left its loop
        # The answers of whole steps, which are being copied to the host: the ranks, their answers, and the event after the copy.
        self._arriving: deque[tuple[list[int], torch.Tensor, Any]] = deque()
        self._clear: Callable[[], None] | None = None  # the call of `zero_grad` that follows the step
        self.state = OwnerState({})

    def open(self) -> None:
        self._abandon()
        error: Exception | None = None
        try:
            self._read_answers()
        except ShardError as problem:  # the other ranks must hear of it
            error = problem
        for engine in self._engines:
            engine.check(error)
        self._passed, self._left_at, self._clear = False, None, None
        self.state = OwnerState(self._optimizer().state)
        self._groups = [group for engine in self._engines for group in engine.begin(self._misuse)]

    def groups(self) -> list[dict[str, Any]]:
        return [group.options for group in self._groups]

    def begin_group(self, number: int) -> None:
        if number != self._at + 1:
            raise self._misuse("began a loop over the groups within another")
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            if number == 0:
                self._left_at = None
                self._groups[0].part.send()
            self._at = number
            group = self._groups[number]
            values = group.part.build()
            if number + 1 < len(self._groups):
                # After this part is built, because the next one's messages take the memory of its messages.
                self._groups[number + 1].part.send()
            group.show({id(entry.param): value for entry, value in zip(group.part.owned, values, strict=True)})
            for entry, value in zip(group.part.owned, values, strict=True):
                self.state.show(value, entry.param)

    def end_group(self, number: int) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            group = self._groups[number]
            group.hide()
            self.state.hide()
            if number:
                self._collect(number - 1)  # before the reply, which takes the memory of these messages
            group.part.reply(self._left_at is not None)
            group.write_back()

    def leave_loop(self, number: int) -> None:
        self._left_at = number
        with contextlib.suppress(Exception):  # which would hide an exception that has ended the loop
            for following in range(number, len(self._groups)):  # other ranks wait in these exchanges
                if following > number:
                    self.begin_group(following)
                self.end_group(following)
            self._finish()
        self._at, self._passed, self._answers = -1, True, []
        self._arriving.clear()

    def end_loop(self) -> None:
        if self._at == len(self._groups) - 1 >= 0:
            self._finish()
            self._read_answers()

    def zero_grad(self, stepped: Callable[[], None], users: Callable[[], None]) -> None:
        if self._at >= 0 or not self._passed:
            raise self._misuse("called zero_grad() before the end of its loop over the groups")
        self._clear = users

    def publish(self) -> None:
        self.end_loop()
        for group in self._groups:
            group.write_back()
        if self._left_at is not None and any(group.part.entries for group in self._groups[self._left_at + 1 :]):
            self._left_at = None
            raise self._misuse("left its loop over the groups before the last")
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
        self._groups, self.state = [], OwnerState({})

    def _collect(self, number: int) -> None:
        part = self._groups[number].part
        self._answers += part.collect().items()
        stepped = [entry.param for entry in part.entries]
        if stepped:
            # Autograd must notice: a graph that has saved one of these must not run any more.
            torch.autograd.graph.increment_version(stepped)

    def _finish(self) -> None:
        """Wait for the last part's values, with which the loop is through."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._collect(len(self._groups) - 1)
            for engine in self._engines:
                engine.end()
        self._at, self._passed = -1, True

    def _read_answers(self) -> None:
        """Raise if another rank has left its loop. The host waits for no device: it reads what has arrived from there."""
        answers, self._answers = self._answers, []
        if answers:
            told = torch.cat([left for _, left in answers]).to("cpu", non_blocking=True)
            event = self.runtimes[0].collectives.streams.record()
            self._arriving.append(([rank for rank, _ in answers], told, event))
        left: set[int] = set()
        while self._arriving and ((event := self._arriving[0][2]) is None or event.query()):
            ranks, told, _ = self._arriving.popleft()
            left.update(rank for rank, has_left in zip(ranks, told.tolist(), strict=True) if has_left)
        if left and self._left_at is None:
            raise ShardError(
                f"rank {self.runtimes[0].collectives.world_rank}: {self._name}.step() ended early on rank(s) "
                f"{', '.join(map(str, sorted(left)))}; see the error there. Parameters that these ranks own may be unchanged, "
                "and all others have been stepped. Go on from a checkpoint."
            )

    def _abandon(self) -> None:
        """Wait for the exchanges of a step that has failed: none may be in flight when the next step begins."""
        in_flight = [exchange for group in self._groups for exchange in group.part.in_flight()]
        if self._at < 0 and not in_flight:
            return
        self._at = -1
        for exchange in in_flight:
            with contextlib.suppress(ShardError):
                exchange.finish()
        for engine in self._engines:
            engine.abandon()
        self._groups = []

    def _misuse(self, what: str) -> ShardError:
        """Return the error for a step that would lose updates; `what` is the predicate of its message."""
        return ShardError(
            f"rank {self.runtimes[0].collectives.world_rank}: {self._name}.step() {what}. An optimizer of kind 'matrix' has full "
            "parameters in the body of `for group in self.param_groups:` only, and must update a group's parameters there. What "
            "it does elsewhere is lost, so go on from a checkpoint."
        )
