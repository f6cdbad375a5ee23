"""Gradient clipping on slices: the whole gradients' norm in one small collective, and no wait for the device.

What is sent, and whether, follows from which parameters there are, never from which gradients this rank has: those of
parameters outside the shards may be on some ranks only, or be cleared by hand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..comm.collectives import Collectives
from ..errors import NonFiniteError
from ..grad_clip.checks import refuse_unfinished
from ..offload.pending_writes import flat_of
from ..runtime.runtime import Runtime
from ..shard_tensor.attributes import get_grad
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unshard.full_values import reduced_grad_of

_flat, _spec = map(operator.attrgetter, ("_shard_state.flat", "_shard_state.spec"))
_PIECE = 1 << 16  # elements


class _Gradients:
    """The gradients of some parameters: slices by the ranks that share them, and plain ones.

    A slice is a 1-D tensor. Where the gradients of a whole flat buffer lie in one piece of memory, that piece stands
    for all of them (padding is zero): one kernel instead of one for each parameter.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Iterable[torch.Tensor] | None,
        ignored: Iterable[torch.Tensor] = (),
        padding: bool = True,
    ) -> None:
        """`parameters`: None for all that are sharded, and those `ignored`. `padding`: whether zeros between the slices make
        no difference."""
        self.comms: dict[int, Any] = {}
        self.slices: dict[int, list[torch.Tensor]] = {}  # per comm, memory to norm and scale
        # Per comm, the slice (or none) of each parameter, with a gradient or not, without padding.
        self.tensors: dict[int, list[list[torch.Tensor]]] = {}
        self.plain: list[torch.Tensor] = []
        self.may_be_plain = False  # on some rank
        self.padded: list[tuple[FlatBuffer, torch.Tensor]] = []
        self._on_host: dict[int, FlatBuffer] = {}  # by id of the piece: those in host memory, which may be on their way
        self.dtypes: dict[torch.dtype, None] = {}  # in the order of their first
        if runtime.in_backward is not None:
            runtime.in_backward.refuse("clipping gradients (engine.clip_grad_norm_, clip_grad_value_)")
        chosen = None if parameters is None else {id(p): p for p in parameters}  # a tied parameter counts once
        refuse_unfinished(runtime, None if chosen is None else chosen.values(), "clipping")
        rest: list[torch.Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for flat in [flat for unit in runtime.units for flat in unit.flats if flat.params]:
                if chosen is not None and not all(map(chosen.__contains__, map(id, flat.params))):
                    continue
                comm = flat.params[0]._spec.comm
                self._open(comm)  # in one order on all ranks
                base = one_piece(flat, wait=False) if padding else None
                if base is not None:
                    self.slices[id(comm)].append(base)
                    if flat.host is not None:
                        self._on_host[id(base)] = flat
                    self.dtypes[base.dtype] = None
                    self.padded.append((flat, base))
                elif chosen is None:
                    rest += flat.params
                if base is not None and chosen is not None:
                    for p in flat.params:
                        del chosen[id(p)]
        self._add([*rest, *ignored] if chosen is None else chosen.values())

    def _add(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            grad = reduced_grad_of(p)
            if not isinstance(p, ShardTensor):
                self.may_be_plain = True
                if p.requires_grad or grad is not None:
                    self.dtypes[p.dtype] = None
                if grad is not None:
                    self.plain.append(grad)
                continue
            comm = p._spec.comm
            self._open(comm)
            local = None
            if grad is not None:
                if not isinstance(grad, ShardTensor):
                    grad = get_grad(p)  # a derivative that autograd made
                self.dtypes[grad.dtype] = None
                local = grad._local if grad._local.numel() else None
            if local is not None:
                self.slices[id(comm)].append(local)
            self.tensors[id(comm)].append([] if local is None else [local])

    def _open(self, comm: Any) -> None:
        if id(comm) not in self.comms:
            self.comms[id(comm)] = comm
            self.slices[id(comm)], self.tensors[id(comm)] = [], []

    def dtype(self) -> torch.dtype:
        """Return the dtype of the norm."""
        result = None
        for dtype in self.dtypes:
            dtype = dtype if not dtype.is_complex else dtype.to_real()
            result = dtype if result is None else torch.promote_types(result, dtype)
        return torch.float32 if result is None else result

    def everything(self) -> list[torch.Tensor]:
        return [s for slices in self.slices.values() for s in slices] + self.plain

    def settle(self) -> None:
        """Wait for what is on its way to host memory."""
        for flat in self._on_host.values():
            assert flat.gradients.host is not None
            flat.gradients.host.pending_writes.wait()

    def norms(self, tensor: torch.Tensor, p: float) -> list[torch.Tensor] | None:
        """Return the norms of the tensor's pieces where they were taken on the way; None where it may be read."""
        flat = self._on_host.get(id(tensor))
        if flat is None or flat.gradients.host is None:
            return None
        found = flat.gradients.host.norms(tensor, p)
        if found is None:
            flat.gradients.host.pending_writes.wait()
        return found

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all by a 0-d factor; those in host memory in the background."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in self.everything():
            if id(tensor) not in self._on_host:
                by_device.setdefault(tensor.device, []).append(tensor)
        for device, tensors in by_device.items():
            torch._foreach_mul_(tensors, factor.to(device))
        for flat, base in self.padded:
            if id(base) in self._on_host:
                flat.gradients.scale(base, factor, flat.gaps)
        # Zero times NaN: the padding must stay zero for the next norm. A GPU is not waited for to know whether it is.
        if factor.device.type != "cpu" or factor.isnan():
            gaps = [b[start:stop] for f, b in self.padded if id(b) not in self._on_host for start, stop in f.gaps]
            if gaps:
                torch._foreach_zero_(gaps)


def one_piece(flat: FlatBuffer, wait: bool = True) -> torch.Tensor | None:
    """Return the 1-D tensor that all gradients of `flat` are shards of, as the reduction left them, or None. `wait` until it
    may be read, where it is on its way to host memory."""
    try:
        grads = list(map(own_grad, flat.params))
        found = list(map(_flat if wait or flat.host is None else flat_of, grads))
        # A gradient of the reduction's has its parameter's own spec; one that was assigned by hand has another.
        own = all(map(operator.is_, map(_spec, grads), map(_spec, flat.params)))
    except AttributeError:
        return None
    base: torch.Tensor | None = found[0]
    return base if own and all(other is base for other in found) else None


def clip_grad_norm_(
    runtime: Runtime,
    parameters: Iterable[torch.Tensor] | None,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    ignored: Iterable[torch.Tensor] = (),
) -> torch.Tensor:
    """Scale gradients so that their global norm is at most `max_norm`. Collective.

    The same numbers as ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, up to the order of summation.

    Args:
        runtime: of the engine.
        parameters: which; None for all that are sharded, and the `ignored` ones. Plain ones count once, with rank 0's norm.
        max_norm: the limit.
        norm_type: any p, ``inf`` and 0 included.
        error_if_nonfinite: wait for the norm and raise where it is NaN or infinite.

    Returns:
        The norm before clipping, 0-d, equal on all ranks, in the gradients' (promoted) dtype; plain parameters count with
        their own, since their gradients may be on some ranks only.

    Raises:
        NonFiniteError: on all ranks, before anything has changed.
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
    """Return the norm, the same 0-d tensor on all ranks, in fp64, as which all that is sent travels.

    The plain gradients' norm travels along and rank 0's counts: the ranks must not scale by different factors.
    """
    c = runtime.collectives
    # Slices of a rank are summed in at least fp32: half precision would round once more for each rank.
    compute = torch.float64 if torch.float64 in grads.dtypes or torch.complex128 in grads.dtypes else torch.float32
    plain = None
    if grads.may_be_plain:
        plain = (_count if p == 0 else local_norm)(grads.plain, p, compute, c.device).double().view(1)
    parts: list[torch.Tensor] = []
    for key, comm in grads.comms.items():
        with_plain = plain if comm.size == c.world > 1 else None
        if p == 0:
            parts.append(_counts(grads.tensors[key], with_plain, members(comm, c)[0], c.device))
        else:
            own = local_norm(grads.slices[key], p, compute, c.device, grads.norms).double().view(1)
            # Norms of ranks combine as norms of tensors do, for every p and without powers that overflow.
            among, counted = members(comm, c)
            if among.size == 1:
                parts.append(own)
                continue
            sent = own if with_plain is None else torch.cat([own, with_plain])
            everyone = among.all_gather(sent, "clip_grad_norm_")
            parts.append(everyone[:, 0] if counted is None else everyone[counted, 0])
            if with_plain is not None:
                parts.append(everyone[0, 1:])
        if with_plain is not None:
            plain = None
    if plain is not None:
        parts.append(_of_rank_0(runtime, plain))
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=c.device)
    values = torch.cat(parts) if len(parts) > 1 else parts[0]
    if p == 0:
        return values.sum()
    total = torch.linalg.vector_norm(values, p)
    if p > 0 or grads.everything():
        return total
    return torch.where(total == math.inf, 0.0, total)  # of no gradients at all, as torch has it


def members(comm: Any, c: Collectives) -> tuple[Any, list[int] | None]:
    """Whom norms are collected from, and which of those count (None: all). Of what tensor parallelism does not cut every plane
    has its own gradients, equal but for rounding; the first plane's count, since all ranks must scale by one factor."""
    if c.topology.data_parallel_groups == 1 or comm is c.full_model:
        return comm, None
    return c.all_ranks, list(c.topology.shard_groups[0])


def _of_rank_0(runtime: Runtime, value: torch.Tensor) -> torch.Tensor:
    """Return rank 0's value, over all ranks: those of a replica are not all, and replicated parameters have no communicator."""
    c = runtime.collectives
    if c.world == 1:
        return value
    return c.all_ranks.all_gather(value, "clip_grad_norm_")[0]


def local_norm(
    tensors: Sequence[torch.Tensor],
    p: float,
    dtype: torch.dtype,
    device: torch.device,
    known: Callable[[torch.Tensor, float], list[torch.Tensor] | None] | None = None,
) -> torch.Tensor:
    """Return the norm of all `tensors` together, 0-d, on `device`. `known`: the norms of a tensor's pieces, where there are
    some."""
    norms: list[torch.Tensor] = []
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    ready: dict[int, torch.Tensor] = {}  # by id of the piece
    for t in tensors:
        if not t.numel():
            continue
        found = known(t, p) if known is not None else None
        pieces: Sequence[torch.Tensor]
        if found is not None and all(norm.dtype == dtype for norm in found):
            # In its place among the others, since the order of a sum shows in its last bits.
            pieces = found
            ready.update(zip(map(id, found), found, strict=True))
        else:
            pieces = _pieces(t)
        groups.setdefault((t.device, t.dtype), []).extend(pieces)
    if not groups:  # what does not change a norm of norms
        return torch.full((), math.inf if p < 0 else 0.0, dtype=dtype, device=device)
    for (_, kind), group in groups.items():
        rest = [t for t in group if id(t) not in ready]
        if len(rest) == len(group) == 1 and len(groups) == 1:
            return torch.linalg.vector_norm(rest[0], p, dtype=dtype).to(device)
        if rest and kind.is_floating_point and p not in (-math.inf,):
            made = iter(torch._foreach_norm(rest, p, dtype=dtype))
        else:
            made = iter([torch.linalg.vector_norm(t, p).to(dtype) for t in rest])
        norms += [ready[id(t)] if id(t) in ready else next(made) for t in group]
    if len(norms) == 1:
        return norms[0].to(device)
    if any(norm.device != device for norm in norms):
        norms = [norm.to(device, non_blocking=True) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(norms), p)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return parts to take norms of: torch adds in fp32 on the CPU, and for 40M equal elements a norm comes out 0.2 % too
    small."""
    if tensor.device.type != "cpu" or tensor.numel() <= 2 * _PIECE or not tensor.is_contiguous():
        return (tensor,)
    return tensor.view(-1).split(_PIECE)


def _count(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return how many tensors are not zero everywhere: what torch's norm of norms gives for p = 0."""
    total = torch.zeros((), dtype=dtype, device=device)
    for t in tensors:
        total += (t != 0).any().to(device)
    return total


def _counts(
    slices: list[list[torch.Tensor]], plain: torch.Tensor | None, comm: Any, device: torch.device
) -> torch.Tensor:
    """Return, 1-D, whether each sharded gradient is not zero everywhere, and rank 0's count of `plain` ones."""
    none = torch.zeros((), dtype=torch.float64, device=device)
    found = [(t[0] != 0).any().to(device, torch.float64) if t else none for t in slices]
    if plain is not None:
        found.append(none if comm.rank else plain[0])
    counts: torch.Tensor = comm.all_reduce(torch.stack(found) if found else none.view(1), "max", "clip_grad_norm_")
    return counts


def clip_grad_value_(
    runtime: Runtime,
    parameters: Iterable[torch.Tensor] | None,
    clip_value: float,
    ignored: Iterable[torch.Tensor] = (),
) -> None:
    """Limit each element of the gradients to ``[-clip_value, clip_value]``. Local, not collective."""
    value = float(clip_value)
    with torch.no_grad():
        grads = _Gradients(runtime, parameters, ignored)
        grads.settle()
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in grads.everything():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for group in groups.values():
            torch._foreach_clamp_min_(group, -value)
            torch._foreach_clamp_max_(group, value)
