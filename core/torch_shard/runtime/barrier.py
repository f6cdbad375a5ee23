"""A barrier before collectives that are not the engine's, in which a rank would wait forever for a missing one."""

from __future__ import annotations

from ..comm.consensus import agree
from ..utils.autograd_private import graph_task
from .runtime import Runtime


def wait_for_all(runtime: Runtime, seconds: float, what: str) -> None:
    """Wait until all ranks have reached `what`. Collective.

    Inside a backward, which comes to the same place at another time on each rank, this returns at once.

    Args:
        runtime: the runtime of the engine whose ranks wait.
        seconds: the least time to wait for a rank, since the work of one rank alone may take so long.
        what: the operation, for messages.

    Raises:
        DivergenceError: another rank is in another operation; names both operations and their lines.
        MissingRankError: another rank did not come in that time.
    """
    c = runtime.collectives
    control = c.watchdog.channels.get("control")
    can_agree = control is not None and not control.groups.broken
    if can_agree and graph_task() == -1:
        with c.watchdog.timeout_at_least(seconds):
            agree(runtime, what)
