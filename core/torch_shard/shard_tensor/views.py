"""Views of gradients and optimizer state: ShardTensors over a part of the same shard.

A shard is a range of a tensor's memory, and so is a view, unless it leaves gaps: ``g.view(-1)``, ``g.t()``, ``g[2]``,
``g[1:3]``, ``g.unsqueeze(0)``, each of ``g.split(2)``. A rank holds the intersection of its shard and the view's range. The
view is a ShardTensor like any other, and an edit of it is an edit of the tensor. Nothing here is collective.

torch itself computes the range: the operator runs on a meta tensor of the same shape and strides.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import LayoutError
from .aliases import note_alias
from .host_memory import pending_writes_of
from .spec import ShardSpec, gather_error, refuse_unreduced
from .state import is_unreduced
from .tensor import ShardTensor

_NAMES = """
view _unsafe_view _reshape_alias as_strided expand select slice t transpose permute unsqueeze squeeze unbind split
split_with_sizes
"""
VIEWS = frozenset(_NAMES.split())
"""View operators by name; ``flatten``, ``chunk``, ``movedim``, ``t[0] = x`` and the like are made of these."""


def following(source: Any, result: ShardTensor) -> ShardTensor:
    """Return `result`, and let it share the background work on the memory that it shares with `source`."""
    writes = pending_writes_of(source)
    if writes is not None:
        writes.add_alias(result)
    return result


def stands_alone(tensor: Any) -> bool:
    """Return True if the user may have views and full copies of a ShardTensor, as of gradients and optimizer state.

    Parameters are unsharded by the engine instead. A tensor that requires a gradient needs derivatives. The shards of a
    deferred gradient belong to different tensors, one of each rank. And an optimizer that the engine does not know should be
    declared, rather than work on full copies on every rank.
    """
    state = tensor._shard_state
    if state.unit_ref is not None or state.origin is not None or is_unreduced(tensor):
        return False
    if torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.requires_grad:
                return False
    step = tensor._spec.comm.unknown_step
    return step is None or not step.runs()


def view(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of :data:`VIEWS`.

    Raises:
        NeedsGatherError: the view leaves gaps; or the view differs from the tensor itself, and the tensor is one whose views
            the user may not have (:func:`stands_alone`).
    """
    source, name = args[0], func._opname
    if not isinstance(source, ShardTensor) or name not in VIEWS:  # t_(), squeeze_()
        raise gather_error(args, func)
    spec = source._spec
    if name == "as_strided" and len(args) > 3 and not spec.layout.aligned:
        raise gather_error(spec, func)  # the storage offset counts from the beginning of the view's base
    like = torch.empty_strided(spec.shape, spec.stride, dtype=source._local.dtype, device="meta")
    try:
        found = func(like, *args[1:], **kwargs)
    except RuntimeError:
        if name != "_unsafe_view" and stands_alone(source):
            raise  # as plain torch does
        # A view of a copy: plain torch would have made the copy contiguous, a ShardTensor keeps its strides.
        raise gather_error(spec, func) from None
    # In inference mode, too, a view of an ordinary tensor is an ordinary tensor; see dispatch._alias.
    with torch.inference_mode(torch.is_inference_mode_enabled() and source.is_inference()):
        if isinstance(found, (list, tuple)):
            return [_over(source, like, each, func) for each in found]
        return _over(source, like, found, func)


def _over(source: Any, like: torch.Tensor, found: torch.Tensor, func: Any) -> ShardTensor:
    spec, local = source._spec, source._local
    start = found.storage_offset()
    if found.shape == like.shape and found.stride() == like.stride() and found.dtype == like.dtype and not start:
        same = ShardTensor._wrap(local, spec, source._unit_ref)
        same._shard_state.mixed = source._shard_state.mixed
        return following(source, note_alias(source, same))
    refuse_unreduced(source, func)
    known = found.dtype == like.dtype and func._opname != "as_strided" and spec.part is None
    if not known or not stands_alone(source):
        raise gather_error(spec, func)
    try:
        layout = spec.layout.view(spec.index, tuple(found.shape), found.stride(), start)
    except LayoutError:
        why = "gives a view with gaps in memory, which no shards have; an edit of a copy would be lost"
        raise gather_error(spec, func, why) from None
    part = ShardSpec(layout, 0, spec.rank, spec.comm)
    if part.length != spec.length:
        first = start + part.start - spec.start if part.length else 0
        # Below autograd a view gets a version counter of its own, but edits must show in that of the shard.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            local = local[first : first + part.length]
    return following(source, ShardTensor._wrap(local, part))
