"""Before a collective of others, in which a rank would wait without a word: is every rank there?"""

from __future__ import annotations

from ..comm.consensus import agree
from ..utils.autograd_private import graph_task
from .runtime import Runtime

__all__ = ["meet"]


def meet(runtime: Runtime, seconds: float, what: str) -> None:
    """Return when all ranks are in `what`; in a forward or a backward, where the engine has no say, at once. Collective.

    Args:
        runtime: whose ranks.
        seconds: how long to wait for a rank at least: work of one rank alone may take so long.
        what: the operation, for messages.

    Raises:
        DivergenceError: another rank waits in another operation; names both, and their lines.
        MissingRankError: another rank did not come in that time.
    """
    if _is_between_operations(runtime):
        with runtime.collectives.watch.patient(seconds):
            agree(runtime, what)


def _is_between_operations(runtime: Runtime) -> bool:
    """Whether the ranks compare what they do at this place: in step, and in no forward or backward of this rank's."""
    control = runtime.collectives.watch.channels.get("control")
    return (
        control is not None
        and not control.groups.broken
        and not runtime.forwards.running
        and not runtime.solo
        and graph_task() == -1
    )
