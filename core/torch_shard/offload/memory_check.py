"""The host memory of a model that is about to be sharded: enough of it, on every rank, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..comm.collectives import Collectives
from . import memory_limits
from .host import Host

if TYPE_CHECKING:
    from ..layout.flat_layout import FlatLayout
    from ..plan.plan import ParamInfo, Plan

__all__ = ["check_memory", "take_shards"]

_Groups = Sequence[Sequence[tuple[Sequence["ParamInfo"], "FlatLayout"]]]  # by unit: what is flattened together


def check_memory(plan: Plan, c: Collectives) -> None:
    """Whether the ranks of each host fit in its memory, optimizer state aside. Collective.

    What the model's present parameters take of it is free only when all of them are sharded, so it does not count.

    Raises:
        HostMemoryError: on all ranks, with the figures. Nothing was allocated.
    """
    everyone = c.everyone

    def gather(own: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = everyone.all_gather(own, "the set-up of offload")
        return found

    if c.backend == "fake":  # no rank answers
        return
    remedy = (
        "Build the model on the meta device, so that it takes no memory beside its shards; keep parameters on disk "
        "(Offload(nvme=..., nvme_params=True)); use more hosts; or leave offload out where the devices have room."
    )
    memory_limits.check(plan.predicted.host_at_setup, gather if c.world > 1 else None, remedy=remedy)


def take_shards(host: Host, groups: _Groups, names: Sequence[str]) -> dict[int, torch.Tensor]:
    """Memory for all shards, by id of their layouts, and for gradients to arrive in. Not collective. `names`: of the units.

    Raises:
        HostMemoryError, DiskError: there is none.
    """
    host.staging.reserve(_staged(host.collectives, groups))
    return {
        id(layout): host.empty_shard(layout.shard_numel, infos[0].dtypes.stored, name)
        for name, unit in zip(names, groups, strict=True)
        for infos, layout in unit
    }


def _staged(c: Collectives, groups: _Groups) -> int:
    """Bytes of the largest flat buffer's gradients on this rank, of those that arrive narrower than ``.grad``."""
    if c.sums_wide:
        return 0
    kinds = ((infos[0], layout) for unit in groups for infos, layout in unit if infos[0].requires_grad)
    arriving = ((infos.dtypes, infos.dtypes.crossing(c.averaged > 1), layout) for infos, layout in kinds)
    return max((layout.shard_numel * d.itemsize for dtypes, d, layout in arriving if d != dtypes.grad), default=0)
