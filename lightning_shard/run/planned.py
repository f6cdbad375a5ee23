"""What makes programs of Lightning shard in ``torch-shard plan``, which runs them on the CPU."""

from __future__ import annotations

import os
from types import ModuleType

from ..registration.autoload import AfterImport
from . import _private


def prepare() -> None:
    """Make programs that are run in this process from now on shard, and need no device. Not collective."""
    from .settings import RUNS, read_settings
    from .takeover import take_over

    # A Trainer that shards without the runner doesn't read the variables.
    settings = read_settings([], os.environ)[0] if RUNS in os.environ else {}
    take_over(settings, [])
    AfterImport(_private.ROOTS, _follow).install()


def _follow(module: ModuleType) -> None:
    ranks, of_node = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    _private.train_on_cpu(_private.ROOTS[module.__name__], of_node, ranks // of_node)
