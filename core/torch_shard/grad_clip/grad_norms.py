"""Norms of each unit's gradients, for which one collective suffices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from ..runtime.runtime import Runtime
from ..unshard.scattered_values import local_grads
from .norms import Owners, common_shard, gather_columns, local_norm, wide_dtype


def grad_norms(
    runtime: Runtime, norm_type: float, parameters: Iterable[torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Return the norms as :meth:`torch_shard.Engine.grad_norms` says. Collective."""
    p = float(norm_type)
    if not p > 0:
        raise ConfigError(f"norm_type must be greater than 0, not {norm_type!r}.")
    if runtime.in_backward is not None:
        runtime.in_backward.refuse("norms of gradients (engine.grad_norms)")
    runtime.await_votes()
    chosen = None if parameters is None else {id(param) for param in parameters}
    c, units = runtime.collectives, runtime.units
    # By the id of a communicator over the ranks that share the shards: each unit's shards, also where this rank has no
    # gradient, so that all ranks send alike.
    comms: dict[int, tuple[Any, list[list[torch.Tensor | None]]]] = {}
    for number, unit in enumerate(units):
        for flat in [flat for flat in unit.flats if flat.params]:
            comm = flat.params[0]._spec.comm
            piece = common_shard(flat, chosen)
            row = comms.setdefault(id(comm), (comm, [[] for _ in units]))[1][number]
            row += local_grads(flat, chosen) if piece is None else [piece]
    columns: list[tuple[Owners | None, torch.Tensor]] = []
    with torch.no_grad():
        for comm, rows in comms.values():
            found = [[shard for shard in row if shard is not None] for row in rows]
            norms = [local_norm(row, p, wide_dtype([s.dtype for s in row]), c.device).double() for row in found]
            columns.append(((c, comm), torch.stack(norms)))
        gathered = gather_columns(c, columns, "engine.grad_norms")
        if not gathered:
            return {}
        totals = torch.linalg.vector_norm(torch.cat(gathered), p, dim=0)
    return {unit.name: norm for unit, norm in zip(units, totals.unbind(), strict=True)}
