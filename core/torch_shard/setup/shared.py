"""The data that the five steps of one ``shard`` share, and how a failure on one rank becomes a failure of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..comm.broadcast_buffers import Coalesced
from ..comm.collectives import Collectives
from ..config.shard_config import ShardConfig
from ..layout.dtensor_placement import Placed
from ..layout.flat_layout import FlatLayout
from ..offload.host import Host
from ..plan.plan import ParamInfo, Plan
from ..runtime.runtime import Runtime
from .checks import fail_together
from .lazy_values import Filler
from .meta_init import Materialiser
from .undo import Undo

Group = tuple[list[ParamInfo], FlatLayout]
"""Parameters of one unit that share a flat buffer, and its layout."""


@dataclass(eq=False)
class Setup:
    """One call of ``shard`` on this rank.

    Functions that may fail on one rank alone are called by :meth:`attempt`, so that this rank still comes to the next collective.
    Before that collective, :meth:`together` raises on all ranks if one has failed.
    """

    model: nn.Module
    config: ShardConfig
    collectives: Collectives
    error: Exception | None = None  # why this rank can't go on
    undo: Undo = field(default_factory=Undo)

    # plan
    plan: Plan = field(init=False)
    params: dict[str, nn.Parameter] = field(init=False)  # by the names of the plan
    modules: dict[str, nn.Module] = field(init=False)  # by all of their names
    placed: dict[str, Placed | None] = field(init=False)  # how DTensor has distributed the parameters
    groups: list[list[Group]] = field(init=False)  # by unit

    # agree
    on_meta: list[bool] = field(
        init=False
    )  # by unit: True if no rank has values for any of its parameters, in memory or in files
    with_values: set[str] = field(init=False)  # parameters that have values on some rank
    sent: set[str] = field(init=False)  # parameters that have values on rank 0, which its broadcast sends
    seed: int = field(init=False)  # the seed of stochastic rounding

    # allocate
    host: Host | None = None
    shards: dict[int, torch.Tensor] = field(default_factory=dict)  # memory in the host, by id of the layout
    runtime: Runtime = field(init=False)
    given: set[str] = field(default_factory=set)  # parameters on meta that got memory for full values on this rank
    materialiser: Materialiser = field(init=False)
    filler: Filler = field(default_factory=Filler)

    # fill
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = field(default_factory=list)  # those that modules are to hold
    has_buffers: bool = False  # some buffers are the same on all ranks
    rank_own: frozenset[str] = frozenset()  # names of buffers that differ between the ranks
    coalesced: Coalesced = field(default_factory=list)  # memory for the broadcast of rank 0's buffers

    def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function`, unless something has failed on this rank already; keep its error for :meth:`together`."""
        if self.error is None:
            try:
                return function(*args)
            except Exception as error:
                self.error = error
        return None

    def together(self) -> None:
        """Raise on every rank if one has failed: its error there, elsewhere an error that names the rank. Collective."""
        fail_together(self.collectives, self.error)
