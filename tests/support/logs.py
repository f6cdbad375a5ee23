"""What the engine logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch_shard.log import logger


@contextlib.contextmanager
def captured_log(level: int = logging.WARNING) -> Iterator[list[str]]:
    """The messages of the engine's logger inside, on this rank. The level is put back: later tests run in the same process."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
