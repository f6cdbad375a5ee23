"""TensorBoardLogger(log_graph=True): rank 0 traces a forward of the model by itself, and needs the whole parameters for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch_shard import Engine
from torch_shard.log import logger

from .._private import traces_graph

__all__ = ["gather_to_trace", "leave_tracing"]


def gather_to_trace(
    loggers: Iterable[Any], engine_of_run: Callable[[], Engine | None], fits: Callable[[], bool]
) -> None:
    """Have loggers' ``log_graph``, which all ranks call, hold whole parameters on rank 0 meanwhile. Not collective by itself.

    Args:
        loggers: the Trainer's.
        engine_of_run: the engine, or None where nothing is sharded when the graph is logged.
        fits: whether each rank can hold whole parameters; collective.
    """
    for each in loggers:
        if traces_graph(each) and "log_graph" not in vars(each):
            each.log_graph = functools.partial(_log_graph, each.log_graph, engine_of_run, fits)


def leave_tracing(loggers: Iterable[Any]) -> None:
    """Undo :func:`gather_to_trace`."""
    for each in loggers:
        if isinstance(vars(each).get("log_graph"), functools.partial):
            del vars(each)["log_graph"]


def _log_graph(
    log_graph: Callable[..., None],
    engine_of_run: Callable[[], Engine | None],
    fits: Callable[[], bool],
    *args: Any,
    **kwargs: Any,
) -> None:
    engine = engine_of_run()
    if engine is None:
        log_graph(*args, **kwargs)
    elif fits():
        with engine.gathered(ranks=0):  # only rank 0 computes then
            log_graph(*args, **kwargs)
    else:
        logger.warning(
            "TensorBoardLogger(log_graph=True): no graph is logged, since whole parameters would not fit in memory. Set "
            "log_graph=False."
        )
