"""Ranks that end their processes at an error, one of them at once, as scripts do that catch nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.ranks import run


def left_with(body: Callable[..., None], *args: Any, first: int, folder: Path, timeout: float = 60.0) -> list[str]:
    """Return the error with which ``body(rank, world_size, *args)`` ends on each of two ranks, as "Class: message".

    Rank `first` ends its process as soon as it has its error, so that the other one must not need it any more. `folder` is one
    that the ranks share, for what that rank says.
    """
    said = folder / f"the error of rank {first}"
    found = run(2, _leave, body, args, first, said, timeout=timeout, may_die=(first,))
    found[first] = said.read_text()
    return found


def _leave(rank: int, world_size: int, body: Callable[..., None], args: Any, first: int, said: Path) -> str:
    try:
        body(rank, world_size, *args)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if rank != first:
            return text
        said.write_text(text)
        os._exit(1)
    raise AssertionError(f"rank {rank} had no error")
