"""Labelled ranges in profiles of ``torch.profiler``: which unit a collective is for, and what a wait waits for."""

from __future__ import annotations

import re

import torch
from torch.profiler import record_function

__all__ = ["profiling", "started", "unit_in", "waiting"]

# True while a profiler records. No public accessor exists (torch 2.13; there since 1.8).
profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

_KINDS = {"all-gather": "all_gather", "gradient reduction": "reduce_scatter"}
_LABEL = re.compile(
    r"torch_shard: (wait for )?the (all-gather|gradient reduction) of unit '(.*?)'(, between replicas)?"
)


def started(what: str) -> record_function:
    """Return a range around the start of a collective; `what` is its name in error messages."""
    return record_function(f"torch_shard: {what}")


def waiting(what: str) -> record_function:
    """Return a range around a wait for a collective of that name."""
    return record_function(f"torch_shard: wait for {what}")


def unit_in(label: str) -> tuple[bool, str, str] | None:
    """Return what a label says of a unit's collective: True for a wait, the kind of collective, and the name of the unit.

    The kinds are those of :mod:`torch_shard.plan.roofline`. None for any other label.
    """
    found = _LABEL.fullmatch(label)
    if found is None:
        return None
    return found[1] is not None, "all_reduce" if found[4] else _KINDS[found[2]], found[3]
