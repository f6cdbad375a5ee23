"""What the engine logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from torch_shard.log import logger


@contextlib.contextmanager
def captured_log() -> Iterator[list[str]]:
    """The messages of the engine's logger inside, on this rank."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
