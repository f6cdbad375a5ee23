"""What a recorder knows of storages, calls and phases while a step runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from .step_trace import Kind, Phase

__all__ = ["Call", "Segment", "Storage"]


@dataclass(eq=False)
class Storage:
    """What is known of one storage so far."""

    number: int
    nbytes: int
    device: str
    born: int  # index of the allocation's event
    segment: int
    kind: Kind | None = None
    name: str = ""
    died: int | None = None
    watch: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(eq=False)
class Call:
    """One call of a module's forward."""

    module: str
    number: int
    outer: int  # the call around it; -1 for none
    recompute: bool
    in_backward: bool = False  # its backward has begun
    last: int = -1  # index of the last event of its backward


@dataclass(eq=False)
class Segment:
    """A stretch of one phase that is all recomputation or all not."""

    phase: Phase
    recompute: bool
    end: int | None = None  # index of the first event after it
