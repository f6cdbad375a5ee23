"""Views of gradients and optimizer state: sharded tensors over a part of the same slice.

A slice is a range of a tensor's memory, and so is what torch calls a view, unless it leaves gaps: ``g.view(-1)``, ``g.t()``,
``g[2]``, ``g[1:3]``, ``g.unsqueeze(0)``, each of ``g.split(2)``. A rank holds what its slice and that range have in common. The
view is a ShardTensor like any other: it is computed with on slices, and an edit of it is one of the tensor. Not collective.

Which range it is torch itself says: the operator runs on a tensor of the same shape and strides that has no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import LayoutError
from ..offload.pending_writes import home_of
from .spec import ShardSpec, gather_error

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["VIEWS", "following", "stands_alone", "view"]

_NAMES = """
view _unsafe_view _reshape_alias as_strided expand select slice t transpose permute unsqueeze squeeze unbind split
split_with_sizes
"""
VIEWS = frozenset(_NAMES.split())
"""Operators; what others give (``flatten``, ``chunk``, ``movedim``, ``t[0] = x``) is made of these."""


def following(source: Any, result: ShardTensor) -> ShardTensor:
    """`result` is of the same memory as `source`."""
    home = home_of(source)
    if home is not None:
        home.follow(result)
    return result


def stands_alone(tensor: Any) -> bool:
    """Whether views and copies of a ShardTensor are for the user to have: of gradients and optimizer state. For parameters the
    engine gathers, and what is recorded needs derivatives. Under no_sync() a gradient is not one tensor's slices but each
    rank's own; and an optimizer that the engine does not know is better declared than given copies on every rank."""
    state = tensor._shard_state
    if state.unit_ref is not None or state.origin is not None or state.unreduced:
        return False
    if torch.is_grad_enabled():
        with torch._C.DisableTorchFunctionSubclass():
            if tensor.requires_grad:
                return False
    step = getattr(tensor._spec.comm, "unknown_step", None)
    return step is None or not step.runs()


def view(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of :data:`VIEWS`.

    Raises:
        NeedsGatherError: the view leaves gaps, or it is not for the user to have and is not the whole in its own shape.
    """
    source, name = args[0], func._opname
    if not isinstance(source, cls) or name not in VIEWS:  # t_(), squeeze_()
        raise gather_error([t._spec for t in args if isinstance(t, cls)], str(func))
    spec = source._spec
    if name == "as_strided" and len(args) > 3 and not spec.layout.aligned:
        raise gather_error([spec], str(func))  # of a view: the place is one in the memory of the tensor
    like = torch.empty_strided(spec.shape, spec.stride, dtype=source._local.dtype, device="meta")
    try:
        found = func(like, *args[1:], **kwargs)
    except RuntimeError:
        if name != "_unsafe_view" and stands_alone(source):
            raise  # as plain torch does
        # Of a copy that plain torch would have made contiguous, and slices have not.
        raise gather_error([spec], str(func)) from None
    results = []
    # An alias of an ordinary tensor is one too, in inference mode as well; see shard_ops.
    with torch.inference_mode(torch.is_inference_mode_enabled() and source.is_inference()):
        for one in found if isinstance(found, (list, tuple)) else (found,):
            results.append(_over(cls, source, like, one, func))
    return results if isinstance(found, (list, tuple)) else results[0]


def _over(cls: type[ShardTensor], source: Any, like: torch.Tensor, found: torch.Tensor, func: Any) -> ShardTensor:
    spec, local = source._spec, source._local
    start = found.storage_offset()
    if found.shape == like.shape and found.stride() == like.stride() and found.dtype == like.dtype and not start:
        return following(source, cls._wrap(local, spec, source._unit_ref))
    known = found.dtype == like.dtype and func._opname != "as_strided" and spec.part is None
    if not known or not stands_alone(source):
        raise gather_error([spec], str(func))
    try:
        layout = spec.layout.view(spec.index, tuple(found.shape), found.stride(), start)
    except LayoutError:
        why = "gives a view with gaps in memory, which has no slices; an edit of a copy would be lost"
        raise gather_error([spec], str(func), why) from None
    part = ShardSpec(layout, 0, spec.rank, spec.comm)
    if part.length != spec.length:
        first = start + part.start - spec.start if part.length else 0
        # Below autograd a view has a version counter of its own, but edits must show in that of the slice.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            local = local[first : first + part.length]
    return following(source, cls._wrap(local, part))
