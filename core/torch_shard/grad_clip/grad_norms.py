"""Norms of each unit's gradients: local norms of slices, and one message that brings the ranks' together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..errors import ConfigError
from ..runtime.runtime import Runtime
from ..shard_tensor.attributes import get_grad
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unshard.full_values import reduced_grad_of
from .clip import local_norm, members, one_piece

__all__ = ["grad_norms"]

_WHAT = "engine.grad_norms"


def grad_norms(
    runtime: Runtime, norm_type: float = 2.0, parameters: Iterable[torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """See :meth:`torch_shard.Engine.grad_norms`. Collective."""
    p = float(norm_type)
    if not p > 0:
        raise ConfigError(f"norm_type must be greater than 0, not {norm_type!r}.")
    if runtime.in_backward is not None:
        runtime.in_backward.refuse("norms of gradients (engine.grad_norms)")
    chosen = None if parameters is None else {id(param) for param in parameters}
    c, units = runtime.collectives, runtime.units
    # A row for each unit, whoever has a gradient: all ranks send alike. With tensor parallelism, a table for what it cuts, and
    # one for what it does not.
    comms: dict[int, Any] = {}
    slices: dict[int, list[list[torch.Tensor]]] = {}
    for number, unit in enumerate(units):
        for flat in unit.flats:
            if not flat.params:
                continue
            comm = flat.params[0]._spec.comm
            if id(comm) not in comms:
                comms[id(comm)], slices[id(comm)] = comm, [[] for _ in units]
            slices[id(comm)][number] += _slices(flat, chosen)
    columns = []
    with torch.no_grad():
        for key, comm in comms.items():
            rows = [local_norm(s, p, _compute_dtype(s), c.device).double() for s in slices[key]]
            among, counted = members(comm, c)
            everyone = among.all_gather(torch.stack(rows), _WHAT)  # ranks, units
            columns.append(everyone if counted is None else everyone[counted])
        if not columns:
            return {}
        norms = torch.linalg.vector_norm(torch.cat(columns), p, dim=0)
    return {unit.name: norm for unit, norm in zip(units, norms.unbind(), strict=True)}


def _slices(flat: FlatBuffer, chosen: set[int] | None) -> list[torch.Tensor]:
    """Return this rank's shards of the gradients, as one tensor where they lie in one."""
    with torch._C.DisableTorchFunctionSubclass():
        wanted = [param for param in flat.params if chosen is None or id(param) in chosen]
        if len(wanted) == len(flat.params):
            base = one_piece(flat)
            if base is not None:
                return [base]
        found = []
        for param in wanted:
            grad = reduced_grad_of(param)
            if grad is not None and not isinstance(grad, ShardTensor):
                grad = get_grad(param)  # a derivative that autograd made
            if grad is not None and grad._local.numel():
                found.append(grad._local)
        return found


def _compute_dtype(slices: list[torch.Tensor]) -> torch.dtype:
    wide = any(s.dtype in (torch.float64, torch.complex128) for s in slices)
    return torch.float64 if wide else torch.float32
