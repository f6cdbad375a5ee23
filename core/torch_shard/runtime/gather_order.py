"""The order of gathers, remembered: what comes next, as far as it came the same way before.

Every gather is an event. The successor of each pair of events is kept, which tells apart the visits of a block that is
used twice, forward from backward, and training from evaluation. All ranks that have run the same events hold the same
memory, so what it predicts may be gathered ahead, and what it predicts right needs no agreement.
"""

from __future__ import annotations

from ..unit.phases import BACKWARD

Event = tuple[int, int, bool]
"""Phase, index of the unit, whether it is the first event of a forward or backward."""


class GatherOrder:
    """The events of one engine. Not collective: it only remembers. `ahead`: how many units are prefetched."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.last: tuple[Event | None, Event | None] = (None, None)
        self._successors: dict[tuple[Event | None, Event | None], Event] = {}
        self._ahead: dict[tuple[Event | None, Event | None], list[int]] = {}  # what `upcoming` has found

    @property
    def phase(self) -> int | None:
        """Phase of the latest event."""
        return self.last[1][0] if self.last[1] is not None else None

    def repeats(self, event: Event) -> bool:
        """Whether `event` is the latest one once more: the unit has not changed."""
        return self.last[1] is not None and self.last[1][:2] == event[:2] and not event[2]

    def advance(self, event: Event) -> bool:
        """Remember that `event` came next; True if that was known."""
        known = self._successors.get(self.last) == event
        if not known:
            self._successors[self.last] = event
            self._ahead.clear()
        self.last = (self.last[1], event)
        return known

    def upcoming(self) -> list[int]:
        """The next units of this phase, at most ``ahead``; never those of the next forward or backward."""
        pair = self.last
        known = self._ahead.get(pair)
        if known is not None:
            return known
        found = self._ahead[pair] = []
        while len(found) < self.ahead:
            event = self._successors.get(pair)
            if event is None or event[0] != self.phase or event[2]:
                break
            found.append(event[1])
            pair = (pair[1], event)
        return found

    def between(self, until: Event | None, limit: int) -> list[Event]:
        """The remembered events of this backward that lie before `until`, or up to its end (None). Empty if `until`
        is not among them."""
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
        """Learn anew."""
        self.last = (None, None)
        self._successors.clear()
        self._ahead.clear()
