"""The one way from an engine to what is behind it, for the tests of the rooms below: no public name leads there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch_shard
    from torch_shard.runtime.runtime import Runtime


def runtime_of(engine: torch_shard.Engine) -> Runtime:
    """Return the runtime of an engine: its units, collectives, reductions and host memory."""
    return engine._runtime
