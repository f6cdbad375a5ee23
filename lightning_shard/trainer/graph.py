"""``TensorBoardLogger(log_graph=True)``: rank 0 traces a forward of the model by itself, which needs the full parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch_shard.log import logger

from .._private import traces_graph
from .memory import fits_on_every_rank


def gather_to_trace(loggers: Iterable[Any], strategy: Any) -> None:
    """Make loggers' ``log_graph``, which all ranks call, hold full parameters on rank 0 meanwhile. Not collective by itself."""
    for each in loggers:
        if traces_graph(each) and "log_graph" not in vars(each):
            each.log_graph = functools.partial(_log_graph, each.log_graph, strategy)


def leave_tracing(loggers: Iterable[Any]) -> None:
    """Undo :func:`gather_to_trace`."""
    for each in loggers:
        if isinstance(vars(each).get("log_graph"), functools.partial):
            del vars(each)["log_graph"]


def _log_graph(log_graph: Callable[..., None], strategy: Any, *args: Any, **kwargs: Any) -> None:
    engine = strategy.engine_or_none
    if engine is None:
        log_graph(*args, **kwargs)
    elif fits_on_every_rank(strategy):
        with engine.gathered(ranks=0):  # only rank 0 computes then
            log_graph(*args, **kwargs)
    else:
        logger.warning("TensorBoardLogger: no graph is logged, since full parameters do not fit. Set log_graph=False.")
