"""Which module's forward runs in a step, and to which call of a module an operator of backward belongs.

Autograd numbers its nodes as they are made. The nodes of a call lie between the numbers at its start and at its end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..utils.autograd_private import sequence_number
from .step_trace import Event, ModuleEnter, ModuleExit
from .storages import Storage

_ACCUMULATES = 1 << 63  # nodes that accumulate have a sequence number above this


@dataclass(eq=False)
class Call:
    """One call of a module's forward."""

    module: str
    number: int
    outer: int  # the call around it; -1 for none
    recompute: bool
    in_backward: bool = False  # its backward has begun
    last: int = -1  # index of the last event of its backward


class ModuleCalls:
    """The calls of a model's modules, as far as a step has come."""

    def __init__(self, model: nn.Module, events: list[Event | Storage]) -> None:
        """Begin without calls; `events` is the list to which beginnings and ends of calls are added."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._events = events
        self.clear()

    def clear(self) -> None:
        """Forget all calls, outside of all modules."""
        self._calls: list[Call] = []
        self._stack: list[Call] = []  # those whose forward runs
        self._marks: tuple[list[int], list[int]] = ([0], [-1])  # sequence numbers, and the call that runs from each on
        self._backward_of = -1  # the call whose backward runs

    # -- forwards -----------------------------------------------------------------------------------------------------
    def knows(self, module: nn.Module) -> bool:
        """Return True for a module of the model."""
        return id(module) in self._names

    def begin(self, module: nn.Module, in_backward: bool) -> Call:
        """Note that the forward of a known module begins; the caller adds the event."""
        if in_backward:
            self.follow_backward()
        outer = self._stack[-1].number if self._stack else -1
        call = Call(self._names[id(module)], len(self._calls), outer, in_backward)
        self._calls.append(call)
        self._stack.append(call)
        self._mark(call.number)
        return call

    def end(self, module: nn.Module) -> None:
        """Write down that the forward of a known module has ended, and those inside of it that an error has ended."""
        name = self._names[id(module)]
        while self._stack:
            call = self._stack.pop()
            self._mark(self._stack[-1].number if self._stack else -1)
            self._events.append(ModuleExit(call.module, call.number, False, call.recompute))
            if call.module == name:
                break

    def _mark(self, call: int) -> None:
        self._marks[0].append(sequence_number())
        self._marks[1].append(call)

    @property
    def running(self) -> str | None:
        """The name of the innermost module whose forward runs; None outside of all."""
        return self._stack[-1].module if self._stack else None

    @property
    def recomputes(self) -> bool:
        """True if the innermost forward that runs has begun in a backward."""
        return bool(self._stack) and self._stack[-1].recompute

    @property
    def in_forward(self) -> bool:
        """True if a forward runs that has not begun in a backward."""
        return any(not call.recompute for call in self._stack)

    # -- backwards ----------------------------------------------------------------------------------------------------
    def follow_backward(self) -> None:
        """Find out whose backward runs, from autograd's node, and write down those that begin."""
        node = torch._C._current_autograd_node()
        number = _ACCUMULATES if node is None else node._sequence_nr()
        if number < _ACCUMULATES:  # else what accumulates belongs to the node before
            self._backward_of = self._marks[1][bisect_right(self._marks[0], number) - 1]
        for call in reversed(list(self._around(self._backward_of))):
            if not call.in_backward:
                call.in_backward = True
                self._events.append(ModuleEnter(call.module, call.number, True, False))
        self.extend_backward()

    def extend_backward(self) -> None:
        """Count the last event to the backward that runs."""
        for call in self._around(self._backward_of):
            call.last = len(self._events) - 1

    def leave_backward(self) -> None:
        """Note that no backward runs any more, or another one."""
        self._backward_of = -1

    @property
    def running_backward(self) -> str | None:
        """The name of the module whose backward runs; None outside of all."""
        return self._calls[self._backward_of].module if self._backward_of >= 0 else None

    def _around(self, number: int) -> Iterator[Call]:
        """Yield a call and those around it, from within."""
        while number >= 0:
            yield self._calls[number]
            number = self._calls[number].outer

    def ends_of_backwards(self) -> dict[int, list[ModuleExit]]:
        """Return the ends of all backwards, by the index of the event after which they come."""
        found: dict[int, list[ModuleExit]] = {}
        for call in reversed(self._calls):  # inner calls have higher numbers, and exit first
            if call.in_backward:
                found.setdefault(call.last, []).append(ModuleExit(call.module, call.number, True, False))
        return found
