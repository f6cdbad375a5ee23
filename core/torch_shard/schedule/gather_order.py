"""The remembered order of unshards, which predicts the next ones.

Every unshard is an event. The successor of each pair of events is remembered. Pairs tell apart the visits of a block that is
used twice, forward from backward, and training from evaluation. All ranks that have run the same events have the same
memory. So a predicted unit may be prefetched, and an event that was predicted needs no agreement of the ranks.
"""

from __future__ import annotations

from .phases import BACKWARD

Event = tuple[int, int, bool]
"""Phase, index of the unit, and True for the first event of a forward or backward."""


class GatherOrder:
    """The events of one engine; `ahead` is the number of units that are prefetched. Nothing here is collective."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.last: tuple[Event | None, Event | None] = (None, None)
        self._successors: dict[tuple[Event | None, Event | None], Event] = {}
        self._upcoming: dict[tuple[Event | None, Event | None], list[int]] = {}  # results of :meth:`upcoming`

    @property
    def phase(self) -> int | None:
        """The phase of the latest event; None where there is none."""
        return self.last[1][0] if self.last[1] is not None else None

    def repeats(self, event: Event) -> bool:
        """Return True if `event` is the latest event once more, of the same unit in the same phase."""
        latest = self.last[1]
        return latest is not None and not event[2] and latest[:2] == event[:2]

    def advance(self, event: Event) -> bool:
        """Remember that `event` came next; return True if it was predicted."""
        known = self._successors.get(self.last) == event
        if not known:
            self._successors[self.last] = event
            self._upcoming.clear()
        self.last = (self.last[1], event)
        return known

    def upcoming(self) -> list[int]:
        """Return the next units of this phase, at most ``ahead``; never those of the next forward or backward."""
        pair = self.last
        found = self._upcoming.get(pair)
        if found is not None:  # hot: asked for each unshard, and the same in each step
            return found
        found, phase = self._upcoming.setdefault(pair, []), self.phase
        while len(found) < self.ahead:
            event = self._successors.get(pair)
            if event is None or event[0] != phase or event[2]:
                break
            found.append(event[1])
            pair = (pair[1], event)
        return found

    def between(self, until: Event | None, limit: int) -> list[Event]:
        """Return the predicted events of this backward before `until`; None means up to the backward's end.

        The result is empty if `until` is not predicted, or more than `limit` events lie before it.
        """
        pair = self.last
        found: list[Event] = []
        while len(found) <= limit:
            event = self._successors.get(pair)
            if event is None or event[0] != BACKWARD or event[2]:
                return found if until is None else []
            if event == until:
                return found
            found.append(event)
            pair = (pair[1], event)
        return []

    def forget(self) -> None:
        """Forget all events, and learn anew."""
        self.last = (None, None)
        self._successors.clear()
        self._upcoming.clear()
