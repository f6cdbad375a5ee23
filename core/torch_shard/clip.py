"""Gradient clipping on slices: the whole gradients' norm in one small collective, and no wait for the device."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import NonFiniteError
from .flat_buffer import FlatBuffer
from .flat_runs import grad_of
from .runtime import Runtime
from .shard_tensor import ShardTensor
from .whole import reduced_grad_of

_flat, _spec = map(operator.attrgetter, ("_flat", "_spec"))
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
        self.tensors: dict[int, list[list[torch.Tensor]]] = {}  # per comm, the slice (or none) of each, without padding
        self.plain: list[torch.Tensor] = []
        self.padded: list[tuple[FlatBuffer, torch.Tensor]] = []
        self.dtypes: list[torch.dtype] = []
        if runtime.in_backward is not None:
            runtime.in_backward.refuse_clipping()
        chosen = None if parameters is None else {id(p): p for p in parameters}  # a tied parameter counts once
        rest: list[torch.Tensor] = []
        with torch._C.DisableTorchFunctionSubclass():
            for flat in [flat for unit in runtime.units for flat in unit.flats if flat.params]:
                if chosen is not None and not all(map(chosen.__contains__, map(id, flat.params))):
                    continue
                base = _one_piece(flat) if padding else None
                if base is not None:
                    self._add_piece(flat, base)
                elif chosen is None:
                    rest += flat.params
                if base is not None and chosen is not None:
                    for p in flat.params:
                        del chosen[id(p)]
        self._add([*rest, *ignored] if chosen is None else chosen.values())

    def _add_piece(self, flat: FlatBuffer, base: torch.Tensor) -> None:
        comm = flat.params[0]._spec.comm
        self._open(comm)
        self.slices[id(comm)].append(base)
        self.dtypes.append(base.dtype)
        self.padded.append((flat, base))

    def _add(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            grad = reduced_grad_of(p)
            if isinstance(p, ShardTensor):
                self._open(p._spec.comm)
            if grad is None:
                continue
            self.dtypes.append(grad.dtype)
            if isinstance(grad, ShardTensor):
                key = id(grad._spec.comm)
                self._open(grad._spec.comm)
                if grad._local.numel():
                    self.slices[key].append(grad._local)
                self.tensors[key].append([grad._local] if grad._local.numel() else [])
            else:
                self.plain.append(grad)

    def _open(self, comm: Any) -> None:
        # Also without a gradient: whether there is one may differ between ranks, the collective may not.
        if id(comm) not in self.comms:
            self.comms[id(comm)] = comm
            self.slices[id(comm)], self.tensors[id(comm)] = [], []

    def everything(self) -> list[torch.Tensor]:
        return [s for slices in self.slices.values() for s in slices] + self.plain


def _one_piece(flat: FlatBuffer) -> torch.Tensor | None:
    """The 1-D tensor that all gradients of `flat` are slices of, as the reduction left them."""
    try:
        grads = list(map(grad_of, flat.params))
        found = list(map(_flat, grads))
        # A gradient of the reduction's has its parameter's own spec; one that was assigned by hand has another.
        own = all(map(operator.is_, map(_spec, grads), map(_spec, flat.params)))
    except AttributeError:
        return None
    base: torch.Tensor = found[0]
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
        The norm before clipping, 0-d, equal on all ranks, in the gradients' (promoted) dtype.

    Raises:
        NonFiniteError: on all ranks, before anything has changed.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    with torch.no_grad():
        grads = _Gradients(runtime, parameters, ignored, padding=norm_type > 0)
        total = _total_norm(runtime, grads, norm_type)
        if error_if_nonfinite and not math.isfinite(total.item()):
            raise NonFiniteError(
                f"rank {runtime.collectives.world_rank}: the gradients' norm of order {norm_type} is {total.item()}, "
                "so they can't be clipped; no gradient was changed. Skip the step, or pass error_if_nonfinite=False to "
                "scale by it anyway."
            )
        # As torch does it: the factor stays on the device, so the host never waits.
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        _scale(grads, factor)
    return total


def _total_norm(runtime: Runtime, grads: _Gradients, p: float) -> torch.Tensor:
    device = runtime.collectives.device
    result = torch.float32
    for i, dtype in enumerate(dict.fromkeys(grads.dtypes)):
        dtype = dtype if not dtype.is_complex else dtype.to_real()
        result = dtype if i == 0 else torch.promote_types(result, dtype)
    # Slices of a rank are summed in at least fp32: half precision would round once more for each rank.
    compute = torch.float64 if result is torch.float64 else torch.float32
    parts = []
    for i, (key, comm) in enumerate(grads.comms.items()):
        plain = grads.plain if i == 0 else []
        if p == 0:
            parts.append(_counts(grads.tensors[key], comm, compute, device))
            parts += [(g != 0).any().to(compute).to(device) for g in plain]
            continue
        own = _norm(grads.slices[key], p, compute, device)
        if comm.size == 1:
            parts += [own, *([_norm(plain, p, compute, device)] if plain else [])]
            continue
        # Norms of ranks combine as norms of tensors do, for every p and without powers that overflow. The plain
        # gradients' norm travels along and rank 0's counts: the ranks must not scale by different factors.
        pair = torch.stack([own, _norm(plain, p, compute, device)])
        everyone = comm.all_gather(pair, "clip_grad_norm_")
        parts += [*everyone[:, 0].unbind(), *([everyone[0, 1]] if plain else [])]
    if not grads.comms:
        counts = [(g != 0).any().to(compute).to(device) for g in grads.plain]
        parts = counts if p == 0 else [_norm(grads.plain, p, compute, device)]
    if not grads.dtypes:
        return torch.zeros((), device=device)
    total = torch.stack(parts).sum() if p == 0 else torch.linalg.vector_norm(torch.stack(parts), p)
    return total.to(result)


def _norm(tensors: Sequence[torch.Tensor], p: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensors = [part for t in tensors if t.numel() for part in _pieces(t)]
    if not tensors:  # what does not change a norm of norms
        return torch.full((), math.inf if p < 0 else 0.0, dtype=dtype, device=device)
    if len(tensors) == 1:
        return torch.linalg.vector_norm(tensors[0], p, dtype=dtype).to(device)
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    norms: list[torch.Tensor] = []
    for (_, kind), group in groups.items():
        if kind.is_floating_point and p not in (-math.inf,):
            norms += torch._foreach_norm(group, p, dtype=dtype)
        else:
            norms += [torch.linalg.vector_norm(t, p).to(dtype) for t in group]
    if len(groups) > 1:
        norms = [n.to(device) for n in norms]
    return torch.linalg.vector_norm(torch.stack(norms).to(device), p)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """On the CPU torch adds in fp32 one after the other: for 40M equal elements a norm comes out 0.2 % too small."""
    if tensor.device.type != "cpu" or tensor.numel() <= 2 * _PIECE or not tensor.is_contiguous():
        return (tensor,)
    return tensor.view(-1).split(_PIECE)


def _counts(tensors: list[list[torch.Tensor]], comm: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """How many gradients are not zero everywhere: what torch's norm of norms gives for p = 0."""
    zero = torch.zeros((), dtype=dtype, device=device)
    found = [(t[0] != 0).any().to(dtype).to(device) if t else zero for t in tensors]
    if not found:
        return zero
    return comm.all_reduce(torch.stack(found), "max", "clip_grad_norm_").sum()


def _scale(grads: _Gradients, factor: torch.Tensor) -> None:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in grads.everything():
        by_device.setdefault(tensor.device, []).append(tensor)
    for device, tensors in by_device.items():
        torch._foreach_mul_(tensors, factor.to(device))
    # Zero times NaN: the padding must stay zero for the next norm. A GPU is not waited for to know whether it is.
    if factor.device.type != "cpu" or factor.isnan():
        _clear_padding(grads)


def _clear_padding(grads: _Gradients) -> None:
    gaps = [base[start:stop] for flat, base in grads.padded for start, stop in flat.gaps]
    if gaps:
        torch._foreach_zero_(gaps)


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
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in grads.everything():
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for group in groups.values():
            torch._foreach_clamp_min_(group, -value)
            torch._foreach_clamp_max_(group, value)
