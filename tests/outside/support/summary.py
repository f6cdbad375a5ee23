"""What a session of programs ends with: the table, and how many programs ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .check import Outcome

__all__ = ["AT_LEAST", "counts", "ran", "table"]

AT_LEAST = 15
"""So many programs of others run if all are started, or the session fails."""


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the table in Markdown."""
    return ["| program | switch | ranks | result | |", "|---|---|---|---|---|", *(each.row() for each in outcomes)]


def ran(outcomes: Sequence[Outcome]) -> int:
    """Return how many programs of others ran."""
    return sum(each.result != "skipped" for each in _of_others(outcomes))


def counts(outcomes: Sequence[Outcome]) -> str:
    """Return a line that says how many programs of others ran, and with which results."""
    found = Counter(each.result for each in _of_others(outcomes))
    results = [*dict.fromkeys(("equal", "refused", "skipped", *found))]
    return f"{ran(outcomes)} outside programs ran: " + ", ".join(f"{found[result]} {result}" for result in results)


def _of_others(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [each for each in outcomes if not each.program.is_library]
