"""Waiting for the other ranks as a script does, so that ranks which do different things hear of it at once.

A rank in ``torch.distributed.barrier()`` says nothing about itself. In ``if accelerator.is_main_process:
accelerator.save_state(...)`` with ``accelerator.wait_for_everyone()`` behind it, rank 0 would wait in the one and the others in
the other until the process group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from torch_shard import Engine
from torch_shard.runtime import Runtime
from torch_shard.use import graph_task
from torch_shard.whole import agree

from .wrapped import engine_of

__all__ = ["meet"]


def meet(models: Iterable[nn.Module], seconds: float, what: str) -> None:
    """Return when all ranks are in `what`; without a sharded model, or where an engine has no say, at once. Collective.

    Args:
        models: prepared ones, the same on all ranks.
        seconds: how long to wait for a rank at least: work of one rank alone may take so long.

    Raises:
        DivergenceError: another rank waits in another operation; names both, and their lines.
        MissingRankError: another rank did not come in that time.
    """
    engine = next((e for e in map(engine_of, models) if e is not None), None)
    if engine is not None and _is_between_operations(engine):
        with engine._runtime.collectives.watch.patient(seconds):
            agree(engine._runtime, what)


def _is_between_operations(engine: Engine) -> bool:
    """Whether the ranks compare what they do at this place: in step, and in no forward or backward of this rank's."""
    runtime: Runtime = engine._runtime
    control = runtime.collectives.watch.channels.get("control")
    return (
        control is not None
        and not control.groups.broken
        and not runtime.in_forward
        and not runtime.solo
        and graph_task() == -1
    )
