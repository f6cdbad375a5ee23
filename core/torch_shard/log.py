"""The logger of all packages of this distribution: ``torch_shard``, with the rank in each line.

The environment variable ``TORCH_SHARD_LOG`` (``DEBUG``, ``INFO``, ``WARNING``, ``ERROR`` or
``CRITICAL``) sets the level on all ranks. Without it rank 0 logs warnings and the other ranks
errors, so that a warning which all ranks have in common is seen once.
"""

from __future__ import annotations

import logging
import os
import sys

__all__ = ["ANY_RANK", "LEVEL_VARIABLE", "current_rank", "logger"]

LEVEL_VARIABLE = "TORCH_SHARD_LOG"
ANY_RANK = {"any_rank": True}
"""``extra`` of a warning that one rank has, which need not be rank 0: it is seen though no level was asked for."""
_FORMAT = "%(asctime)s %(levelname)s torch_shard rank %(rank)s: %(message)s"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


def current_rank() -> int:
    """Return this process's global rank. Not collective.

    It is that of the default process group; before there is one, that of the launcher's ``RANK``
    variable; 0 otherwise.
    """
    # Looked up rather than imported: a log line must not import torch.distributed.
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


class _RankFilter(logging.Filter):
    """Adds ``record.rank``, and keeps the other ranks quiet where no level was asked for."""

    def __init__(self, quiet_other_ranks: bool) -> None:
        super().__init__()
        self.quiet_other_ranks = quiet_other_ranks

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = rank = current_rank()
        if self.quiet_other_ranks and rank != 0 and logger.level == logging.WARNING:
            return record.levelno >= logging.ERROR or hasattr(record, "any_rank")
        return True


class _FallbackHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error only where the program configured no logging of its own.

    Records go to the root logger's handlers anyway; a second line for each would be noise.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr  # it may have been replaced since import
            super().emit(record)


def _configure() -> logging.Logger:
    log = logging.getLogger("torch_shard")
    asked = os.environ.get(LEVEL_VARIABLE, "").strip().upper()
    log.setLevel(asked if asked in _LEVELS else logging.WARNING)
    # A logger outlives a reload of this module: one filter and one handler, always.
    log.filters[:] = [_RankFilter(quiet_other_ranks=asked not in _LEVELS)]
    handler = _FallbackHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    log.handlers[:] = [handler]
    return log


logger = _configure()

if os.environ.get(LEVEL_VARIABLE, "").strip().upper() not in ("", *_LEVELS):
    logger.warning(
        "%s=%r is not a level; it can be %s. Using WARNING.",
        LEVEL_VARIABLE,
        os.environ[LEVEL_VARIABLE],
        ", ".join(_LEVELS),
    )
