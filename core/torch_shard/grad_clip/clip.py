"""Gradient clipping on shards: the norm of the full gradients takes one small collective, and the host waits for no device.

The parameters alone decide what is sent, never which gradients this rank has: parameters outside the shards may have theirs
on some ranks only, and gradients may be cleared by hand.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import torch

from ..comm.streams import streams_of
from ..errors import NonFiniteError
from ..offload.host_gradients import HostGradients
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.unit import unit_of
from ..unshard.scattered_values import local_grads
from .checks import refuse_partials
from .norms import Owners, common_shard, gather_columns, local_norm, wide_dtype


class _Gradients:
    """The gradients of some parameters: shards, grouped by the communicator of the ranks that share them, and plain tensors."""

    def __init__(
        self,
        runtime: Runtime,
        parameters: Iterable[torch.Tensor] | None,
        ignored: Iterable[torch.Tensor],
        padding: bool = True,
    ) -> None:
        """Find the gradients.

        Args:
            runtime: the engine's runtime.
            parameters: the parameters whose gradients count, also of other engines' models. None for all that are sharded, and
                the `ignored` ones.
            ignored: the model's parameters that are not sharded.
            padding: True if zeros between the shards make no difference.
        """
        # By the id of a communicator, which all ranks add in one order: the communicator, with its engine's collectives, and the
        # shards.
        self.shards: dict[int, tuple[Owners, list[torch.Tensor | None]]] = {}
        self._flats: dict[int, FlatBuffer] = {}  # by the id of a tensor that holds all of a flat buffer's gradients
        if runtime.in_backward is not None:
            runtime.in_backward.refuse("clipping gradients (engine.clip_grad_norm_, clip_grad_value_)")
        chosen = None if parameters is None else {id(p): p for p in parameters}  # a tied parameter counts once
        refuse_partials(runtime, None if chosen is None else chosen.values(), "clipping")
        units = runtime.units if chosen is None else dict.fromkeys(filter(None, map(unit_of, chosen.values())))
        for each in {unit.runtime for unit in units}:
            each.await_votes()
        for flat in [flat for unit in units for flat in unit.flats if flat.params]:
            if chosen is not None and chosen.keys().isdisjoint(map(id, flat.params)):
                continue
            piece = common_shard(flat, chosen, wait=False) if padding else None
            if piece is not None:
                self._flats[id(piece)] = flat
            shards = local_grads(flat, chosen) if piece is None else [piece]
            comm = flat.params[0]._spec.comm
            self.shards.setdefault(id(comm), ((flat.collectives, comm), []))[1].extend(shards)
        plain = [p for p in (ignored if chosen is None else chosen.values()) if not isinstance(p, ShardTensor)]
        self.may_be_plain = bool(plain)  # some ranks may have gradients of plain parameters
        self.plain = [p.grad for p in plain if p.grad is not None]
        found = [shard.dtype for _, shards in self.shards.values() for shard in shards if shard is not None]
        found += [p.dtype for p in plain if p.requires_grad or p.grad is not None]
        self.dtypes = list(dict.fromkeys(found))

    def dtype(self) -> torch.dtype:
        """Return the dtype of the norm."""
        real = [dtype.to_real() for dtype in self.dtypes]
        return functools.reduce(torch.promote_types, real) if real else torch.float32

    def everything(self) -> list[torch.Tensor]:
        """Return all tensors that hold gradients."""
        return [s for _, shards in self.shards.values() for s in shards if s is not None] + self.plain

    def on_its_way(self, tensor: torch.Tensor) -> HostGradients | None:
        """Return the object that copies, or has copied, `tensor` to host memory; None if the tensor is not offloaded."""
        flat = self._flats.get(id(tensor))
        return None if flat is None else flat.gradients.host

    def norms(self, tensor: torch.Tensor, p: float) -> list[torch.Tensor] | None:
        """Return the norms of the tensor's pieces if they were taken while it was copied to host memory.

        Otherwise return None, once `tensor` may be read.
        """
        host = self.on_its_way(tensor)
        if host is None:
            return None
        found = host.norms(tensor, p)
        if found is None:
            host.pending_writes.wait()
        return found

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients by a 0-d factor; those in host memory in the background."""
        # A NaN factor would make the zero padding NaN. On a GPU the padding is always zeroed, because reading the factor would
        # wait for the device.
        spoils = streams_of(factor.device).exist or bool(factor.isnan())
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        gaps: list[torch.Tensor] = []
        for tensor in self.everything():
            flat = self._flats.get(id(tensor))
            if flat is not None and flat.gradients.host is not None:
                flat.gradients.scale(tensor, factor, flat.gaps)
                continue
            by_device.setdefault(tensor.device, []).append(tensor)
            if flat is not None and spoils:
                gaps += [tensor[start:stop] for start, stop in flat.gaps]
        for device, tensors in by_device.items():
            torch._foreach_mul_(tensors, factor.to(device))
        if gaps:
            torch._foreach_zero_(gaps)


def clip_grad_norm_(
    runtime: Runtime,
    parameters: Iterable[torch.Tensor] | None,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    ignored: Iterable[torch.Tensor],
) -> torch.Tensor:
    """Scale gradients as :meth:`torch_shard.Engine.clip_grad_norm_` says. Collective.

    The numbers are those of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, up to the order of summation.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    with torch.no_grad():
        grads = _Gradients(runtime, parameters, ignored, padding=norm_type > 0)
        exact = _total_norm(runtime, grads, norm_type)
        total = exact.to(grads.dtype())
        if error_if_nonfinite and not math.isfinite(exact.item()):
            raise NonFiniteError(
                f"rank {runtime.collectives.world_rank}: the gradients' norm of order {norm_type} is {exact.item()}, "
                "so they can't be clipped; no gradient was changed. Skip the step, or pass error_if_nonfinite=False to "
                "scale by it anyway."
            )
        # As torch does it: the factor stays on the device, so the host never waits.
        factor = torch.clamp(max_norm / (exact + 1e-6), max=1.0)
        grads.scale(factor.to(total.dtype))
    return total


def _total_norm(runtime: Runtime, grads: _Gradients, p: float) -> torch.Tensor:
    """Return the norm, the same 0-d tensor of float64 on all ranks. Collective."""
    c, compute = runtime.collectives, wide_dtype(grads.dtypes)
    columns: list[tuple[Owners | None, torch.Tensor]] = []
    for owners, shards in grads.shards.values():
        if p == 0:
            columns.append((owners, _any_nonzero(shards, c.device)))
        else:
            present = [s for s in shards if s is not None]
            columns.append((owners, local_norm(present, p, compute, c.device, grads.norms).double().view(1)))
    if grads.may_be_plain:
        plain = _any_nonzero(grads.plain, c.device).sum() if p == 0 else local_norm(grads.plain, p, compute, c.device)
        columns.append((None, plain.double().view(1)))
    gathered = gather_columns(c, columns, "clip_grad_norm_")
    if not gathered:
        return torch.zeros((), dtype=torch.float64, device=c.device)
    if p == 0:  # torch's norm of norms: the number of tensors that are not zero everywhere
        return torch.stack([rows.amax(0).sum() for rows in gathered]).sum()
    # Norms of ranks combine as norms of tensors do, for every p and without powers that overflow.
    total = torch.linalg.vector_norm(torch.cat([rows.view(-1) for rows in gathered]), p)
    if p > 0 or grads.everything():
        return total
    return torch.where(total == math.inf, 0.0, total)  # torch's norm of no gradients at all


def _any_nonzero(tensors: Iterable[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Return for each tensor 1 if some element is not zero, else 0: 1-D, float64."""
    found = [torch.zeros((), device=device) if t is None else (t != 0).any().to(device) for t in tensors]
    return (
        torch.stack([flag.double() for flag in found]) if found else torch.zeros(0, dtype=torch.float64, device=device)
    )


def clip_grad_value_(
    runtime: Runtime,
    parameters: Iterable[torch.Tensor] | None,
    clip_value: float,
    ignored: Iterable[torch.Tensor],
) -> None:
    """Limit each element of the gradients to ``[-clip_value, clip_value]``, on all ranks."""
    value = float(clip_value)
    with torch.no_grad():
        grads = _Gradients(runtime, parameters, ignored)
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in grads.everything():
            host = grads.on_its_way(tensor)
            if host is not None:
                host.pending_writes.wait()
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for group in groups.values():
            torch._foreach_clamp_min_(group, -value)
            torch._foreach_clamp_max_(group, value)
