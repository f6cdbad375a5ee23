"""An error that says what holds the memory when it runs out in an optimizer's step.

torch has hooks before and after a step, but none for a step that fails. So this sees only the part of a step that the engine runs
itself, in which most optimizers make their state, and what front ends call within :func:`explained`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..runtime.out_of_memory import OPTIMIZER_STEP, explain
from .engines_of_optimizer import first_runtime


@contextmanager
def explained(optimizer: Any) -> Iterator[None]:
    """Return a context for a step of `optimizer`: an error that memory has run out says what holds it. Not collective."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        runtime = first_runtime(optimizer)
        # Else a closure has failed, which runs a forward and a backward.
        if runtime is not None and runtime.versions.changing:
            explain(runtime, error, OPTIMIZER_STEP)
        raise
