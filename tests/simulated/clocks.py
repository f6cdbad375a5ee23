"""Agents with vector clocks: who works in order, and what each of them knows of the work of others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Clock: TypeAlias = dict["Agent", int]
"""For each agent how many of its operations have happened before."""

_numbers = itertools.count()


class Agent:
    """Whatever does one thing after the other: a host thread, a stream of the device, a communicator's own stream.

    Attributes:
        name: for messages.
        clock: what has happened before its next operation.
    """

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Clock()
        self._number = next(_numbers)

    def __hash__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return self.name

    def join(self, clock: Mapping[Agent, int]) -> None:
        """Put what `clock` knows before the next operation."""
        own = self.clock
        for agent, epoch in clock.items():
            if own.get(agent, 0) < epoch:
                own[agent] = epoch

    def tick(self) -> int:
        """Begin an operation, and return its number."""
        epoch = self.clock[self] = self.clock.get(self, 0) + 1
        return epoch

    def knows(self, agent: Agent, epoch: int) -> bool:
        """Return True if operation `epoch` of `agent` happens before the next one of this agent."""
        return self.clock.get(agent, 0) >= epoch


@dataclass(frozen=True)
class Access:
    """One operation of an agent that reads or writes memory."""

    agent: Agent
    epoch: int
    what: str

    def before(self, agent: Agent) -> bool:
        """Return True if the access happens before the next operation of `agent`."""
        return agent.knows(self.agent, self.epoch)

    def __str__(self) -> str:
        return f"{self.what} on {self.agent}"


def unordered(accesses: Iterable[Access], agent: Agent) -> list[Access]:
    """Return those that do not happen before the next operation of `agent`."""
    return [access for access in accesses if not access.before(agent)]
