"""Aliases of a parameter (``p.data``, ``p.detach()``): they share its shard until ``p.data`` is assigned other values.

Plain torch gives the parameter the memory of the assigned tensor then, and its aliases keep the memory of before. Programs put
values aside like that (``old = p.data; p.data = average; ...; p.data = old``). The shard must stay where it is, in the memory of
its unit, so that the aliases get memory of their own instead.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .changes import remember
from .host_memory import pending_writes_of
from .spec import shard_of_full
from .state import ShardState
from .tensor import ShardTensor


def note_alias(source: Any, result: ShardTensor) -> ShardTensor:
    """Note that `result` has the memory of `source`, if that is a parameter or an alias of one; return `result`."""
    state = source._shard_state
    if state.aliases is None:
        if state.unit_ref is None:
            return result
        state.aliases = weakref.WeakSet()
    result._shard_state.aliases = state.aliases
    state.aliases.add(result._shard_state)
    return result


def is_alias(tensor: Any) -> bool:
    """Return True if a ShardTensor is an alias of a parameter, or was one until other values were assigned."""
    state = tensor._shard_state
    return state.aliases is not None and not state.is_parameter


def is_leaf_alias(tensor: Any) -> bool:
    """Return True for ``p.detach().requires_grad_()``, ``nn.Parameter(p.data)`` and the like, which have their own gradients."""
    if not is_alias(tensor):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.requires_grad and tensor.is_leaf)


def leave_values(param: ShardTensor, full: torch.Tensor | None = None) -> None:
    """Give the aliases of a parameter memory of their own, with its values. Call this before other values are assigned.

    Not collective. `full`: the parameter's present values, if they are not in its shard yet.
    """
    from .derivation import Derivation  # which imports this module

    aliases, param._shard_state.aliases = param._shard_state.aliases, None
    if not aliases:
        return
    with torch.no_grad(), torch.inference_mode(False):
        shard = param._local if full is None else shard_of_full(full.detach(), param._spec)
        values = ShardTensor._wrap(shard.to(param._local.device, copy=True), param._spec)
        if full is None:
            remember(values, param)
        assert param._unit_ref is not None
        values._shard_state.origin = Derivation(param._unit_ref)  # so that functions get it in full where they need it
    for state in list(aliases):
        _set_memory(state, values._shard_state)


def put_back(param: ShardTensor, value: Any) -> None:
    """Let `value`, which was assigned to a parameter, be an alias of it again if it was one, and the tensors over its memory."""
    if not isinstance(value, ShardTensor) or not is_alias(value):
        return
    state, own = value._shard_state, param._shard_state
    if state.unit_ref is not None or state.spec is not own.spec:  # an alias of another parameter stays one
        return
    assert state.aliases is not None
    writes = pending_writes_of(param)
    for each in list(state.aliases):
        _set_memory(each, own)
        each.pending_writes = writes
    own.aliases = state.aliases


def assign_to_alias(alias: ShardTensor, value: Any, new: torch.Tensor) -> None:
    """Carry out ``alias.data = value``: the alias gets memory of its own, and the parameter keeps its values. Not collective.

    `new`: this rank's shard of `value`.
    """
    state = alias._shard_state
    assert state.aliases is not None
    state.aliases.discard(state)
    state.aliases = None
    with torch.no_grad(), torch.inference_mode(False):
        values = ShardTensor._wrap(new.clone(), alias._spec)
        if isinstance(value, ShardTensor):
            remember(values, value)
    _set_memory(state, values._shard_state)
    state.aliases = weakref.WeakSet([state])


def _set_memory(state: ShardState, other: ShardState) -> None:
    state.local, state.unit_ref, state.copied_from = other.local, other.unit_ref, other.copied_from
    state.origin, state.pending_writes = other.origin, None
