"""Sums of an engine's figures over steps."""

from __future__ import annotations

from dataclasses import dataclass

from torch_shard import Statistics

WAITS = ("gather_wait", "reduce_wait", "other_wait", "host_wait")


@dataclass
class Window:
    """The figures of one rank summed over some steps; ``peak_gathered`` is their maximum."""

    steps: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    gather_wait: float = 0.0
    reduce_wait: float = 0.0
    other_wait: float = 0.0
    host_wait: float = 0.0
    peak_gathered: int = 0

    def add(self, seconds: float, figures: Statistics | Window) -> None:
        """Add the figures of a micro-batch."""
        self.seconds += seconds
        self.bytes_sent += figures.bytes_sent
        for name in WAITS:
            setattr(self, name, getattr(self, name) + getattr(figures, name))
        self.peak_gathered = max(self.peak_gathered, figures.peak_gathered)

    def join(self, other: Window) -> None:
        """Add the steps of another window."""
        self.steps += other.steps
        self.add(other.seconds, other)

    @property
    def share(self) -> float:
        """The share of the time that was spent waiting for gathers and reductions."""
        return (self.gather_wait + self.reduce_wait) / self.seconds if self.seconds else 0.0
