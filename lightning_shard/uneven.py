"""Ranks with different numbers of batches to evaluate: found in the last batch of the rank that has fewest.

Under DDP they work, since a forward without gradients sends nothing. Here it gathers parameters, so all ranks must take part.
Each forward of an evaluation step says whether its batch is this rank's last; the engine compares that at no cost with what
the ranks compare anyway, and nothing is compared where nothing is gathered (within ``engine.gathered()``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch_shard

from ._private import is_last_to_evaluate

__all__ = ["batch_of"]


@contextlib.contextmanager
def batch_of(step: str, module: Any) -> Iterator[None]:
    """Inside, forwards compute with a batch of ``validation``, ``test`` or ``predict``, and the ranks must agree whether it is
    the last one. Not collective by itself.

    Raises:
        DivergenceError: on all ranks, from the forward: it is on some of them only.
    """
    engine = torch_shard.engine_of(module)
    agreement = engine._runtime.agreement if engine is not None else None
    if agreement is None:
        yield
        return
    last = is_last_to_evaluate(module.trainer)
    agreement.batch = (
        f"the last batch of its {step} loop" if last else f"a batch of its {step} loop before the last one"
    )
    try:
        yield
    finally:
        agreement.batch = ""
