"""The order in which units are reduced, and how many reductions may be in flight."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, TypeVar

# How many reductions may be in flight before backward pauses for the oldest. Each reduction holds its unit's gradients and, over
# Gloo, a buffer of the same size for the values received. The pause is short: a rank that leaves a parameter unused issues its
# reductions only at the end of backward, and until then it may need a gather from this rank. On a GPU one more reduction is
# allowed, because the GPU's queue would run empty while the host waits.
IN_FLIGHT, IN_FLIGHT_ON_STREAMS = 1, 2


class _Indexed(Protocol):
    index: int


_Unit = TypeVar("_Unit", bound=_Indexed)


def reduction_order(used: Sequence[_Unit], incomplete: Collection[int]) -> list[_Unit]:
    """Return the units in the order in which a backward reduces them.

    Args:
        used: the units of the backward, in the order of their first use in forward.
        incomplete: the indices of units with a parameter that had no gradient on any rank in the backward before. They come
            last, where they hold up no other unit.
    """
    backwards = used[::-1]
    return sorted(backwards, key=lambda unit: unit.index in incomplete)  # stable


def has_too_many(in_flight: int, on_streams: bool) -> bool:
    """Return True if backward has to wait for the oldest of its reductions; `on_streams`: they run on a stream of a device."""
    return in_flight > (IN_FLIGHT_ON_STREAMS if on_streams else IN_FLIGHT)
