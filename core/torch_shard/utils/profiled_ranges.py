"""Labelled ranges in profiles of ``torch.profiler``, for starts of units' collectives and for waits for them."""

from __future__ import annotations

import ast
import re
import string
from urllib.parse import quote, unquote

import torch
from torch.autograd.profiler import record_function

# True while a profiler records. No public accessor exists (torch 2.13; there since 1.8).
profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]

# Kineto writes labels into JSON as they are, and drops those that are not ASCII.
_SAFE = "".join(set(string.punctuation + " ") - set('"\\%'))
_KINDS = {"all-gather": "all_gather", "gradient reduction": "reduce_scatter"}
_LABEL = re.compile(
    r"torch_shard: (wait for )?the (all-gather|gradient reduction) of unit ('.*?'|\".*?\")(, between replicas)?"
)


def started(what: str) -> record_function:
    """Return a range around the start of a collective; `what` is its name in error messages."""
    return record_function("torch_shard: " + quote(what, _SAFE))


def waiting(what: str) -> record_function:
    """Return a range around a wait of the host for a collective of that name."""
    return record_function("torch_shard: wait for " + quote(what, _SAFE))


def unit_in(label: str) -> tuple[bool, str, str] | None:
    """Return the unit's collective in a label: True for a wait, the kind of collective, and the name of the unit.

    The kinds are those of :mod:`torch_shard.plan.roofline`; a reduction within a replica is a ``"reduce_scatter"``, however the
    backend makes it. Returns None for any other label.
    """
    found = _LABEL.fullmatch(unquote(label)) if label.startswith("torch_shard: ") else None
    if found is None:
        return None
    return found[1] is not None, "all_reduce" if found[4] else _KINDS[found[2]], ast.literal_eval(found[3])
