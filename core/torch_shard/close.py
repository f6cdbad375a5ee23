"""``engine.close``, after which parameters are full and plain again, in the same Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .comm.consensus import agree
from .errors import UnitStateError
from .layout.dtensor_placement import is_dtensor, made_like, placed_of, replicated_like
from .optim import state_tree
from .optim.engines_of_optimizer import params_of
from .optim.registry import counters_in, is_counter
from .runtime.runtime import Runtime
from .shard_tensor.tensor import ShardTensor
from .shard_tensor.unsharded_param import set_own_grad
from .state import optimizer_state
from .state.param_names import names_by_id
from .unit.flat_buffer import FlatBuffer
from .unit.full_values import full_flat, full_tensors_from
from .unit.module_params import copy_attributes, held_by
from .unit.unit import Unit
from .unshard.scattered_values import local_grads


def close_units(runtime: Runtime, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module) -> None:
    """Turn every sharded parameter into a full plain ``nn.Parameter``, the same object; see :meth:`.Engine.close`. Collective.

    ``requires_grad``, attributes and hooks are kept. Hooks see the local gradient and are called once ``.grad`` is accumulated,
    as in plain torch.
    """
    error: Exception | None = None
    try:
        for unit in runtime.units:
            for flat in unit.flats:
                if flat.host is not None:
                    flat.host.pending_writes.wait()  # pending writes hold weak references to tensors, which would prevent a swap
            _check(unit)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(runtime, "engine.close", [type(o).__name__ for o in optimizers], error)
    left_out = [o for o, owned in runtime.owners.items() if owned and not any(o is other for other in optimizers)]
    states = [(o, optimizer_state.optim_state_dict(runtime, o, False, model, own=True)) for o in optimizers]
    names = names_by_id(runtime.units, model)
    runtime.schedule.reshard_unused()
    for unit in runtime.units:
        plain: list[tuple[ShardTensor, nn.Parameter]] = []
        for flat in unit.flats:
            full = full_flat(flat, unit.gather_text)
            grads = full_tensors_from(flat, local_grads(flat), f"the gradients of unit {unit.name!r}")
            plain += [(p, _plain(unit, flat, full, i, grads[i])) for i, p in enumerate(flat.params)]
            del full, grads  # before the next ones are allocated
        rnns = [m for m, *_ in unit.places if isinstance(m, nn.RNNBase)]
        for module in rnns:
            module._flat_weights, module._flat_weight_refs = [], []
        for param, new in plain:
            _swap(param, new)
        unit.flats.clear()  # this frees the shards and everything gathered
        unit.places.clear()
        for module in dict.fromkeys(rnns):
            module._init_flat_weights()
    for optimizer, state in states:
        _give_back(optimizer, names, state["state"])
    if runtime.collectives.size > 1:
        for optimizer in left_out:
            if hasattr(optimizer, "register_step_pre_hook"):
                _refuse_owners_state(optimizer, runtime.collectives.world_rank, set(names))
    runtime.units.clear()
    runtime.schedule.gathered.clear()
    runtime.in_backward = None


def _give_back(optimizer: torch.optim.Optimizer, names: dict[int, str], state: dict[str, Any]) -> None:
    """Give `optimizer` full state in place of shards, without ``load_state_dict``, which would change dtypes."""
    counters = counters_in((p, state.get(names.get(id(p), ""))) for p in params_of(optimizer))
    for group in optimizer.param_groups:
        counts_on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            if id(p) not in names:  # a parameter of another model
                continue
            entries = state.get(names[id(p)])
            if entries:
                optimizer.state[p] = {
                    key: state_tree.copied(value, "cpu" if key == "step" and not counts_on_device else str(p.device))
                    for key, value in entries.items()
                }
                if is_dtensor(p):
                    _distribute(p, optimizer.state[p], counters)
            else:
                optimizer.state.pop(p, None)


def _distribute(param: Any, entries: dict[str, Any], counters: frozenset[Any]) -> None:
    """Make DTensors of those entries of a DTensor parameter's state that would be DTensors without the engine.

    torch computes with DTensors and plain tensors together only if the plain ones are 0-dim.
    """
    placed = placed_of(param, "")
    for key, value in entries.items():  # values may be replaced in the loop, since the keys stay
        if isinstance(value, torch.Tensor) and optimizer_state.is_elementwise(param, key, value.shape, counters):
            entries[key] = made_like(param, value)
        elif (
            placed is not None
            and placed.part is None
            and not is_counter(key, getattr(value, "shape", torch.Size()), counters)
        ):
            # State of any shape, as optimizers of full matrices keep it. Every rank has the full parameter, and so its state.
            entries[key] = state_tree.map_tensors(value, lambda full: replicated_like(param, full))


def _refuse_owners_state(optimizer: Any, rank: int, params: set[int]) -> None:
    """Make it an error to step an optimizer of full matrices that was not passed to ``engine.close``.

    The state of such an optimizer has stayed with the parameters' owners. Each rank would step plain parameters with a part
    of the state, and replicas would silently differ.

    Args:
        optimizer: the optimizer, which is hooked until state is loaded into it.
        rank: this rank, for the message.
        params: ids of the closed engine's parameters. Weak references would keep them from being sharded again.
    """

    def refuse(optimizer: Any, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in params]
        if not held or any(isinstance(p, ShardTensor) for p in held):
            return  # another engine has sharded the parameters, and finds the state with their owners
        name = type(optimizer).__name__
        raise UnitStateError(
            f"rank {rank}: {name}.step() on a model whose engine was closed without naming it, so each rank has the state "
            f"of some parameters only. Close with engine.close(optimizer), or load the optimizer's state, or make a new {name}. "
            "Nothing was changed."
        )

    hook = optimizer.register_step_pre_hook(refuse)
    optimizer.register_load_state_dict_post_hook(lambda _: hook.remove())


def _check(unit: Unit) -> None:
    rank = unit.collectives.world_rank
    unit.runtime.leave_interrupted()
    if unit.running or unit.is_summoned:
        raise UnitStateError(
            f"rank {rank}: engine.close() inside a forward or engine.gathered() of unit {unit.name!r}; leave it first."
        )
    for name, param in zip(unit.names, unit.params, strict=True):
        if held := held_by(param, (module for module, *_ in unit.places)):
            raise UnitStateError(f"rank {rank}: {name} {held}")


def _plain(unit: Unit, flat: FlatBuffer, full: torch.Tensor, index: int, grad: torch.Tensor | None) -> nn.Parameter:
    param, unsharded_param, name = flat.params[index], flat.unsharded_params[index], flat.layout.slots[index].name
    with torch.inference_mode(False), torch.no_grad():
        # A clone, because saving a view would save the memory of the full unit.
        values = flat.as_given(flat.view(full, index).clone(), index)
        with torch._C.DisableTorchFunctionSubclass():
            wants = param.requires_grad
        plain = nn.Parameter(values, requires_grad=wants)
        if grad is not None:
            plain.grad_dtype = grad.dtype
            plain.grad = flat.as_given(grad.clone(), index)
    copy_attributes(param, plain)
    # The dicts themselves, so that users' handles still remove their hooks.
    hooks: Any = unsharded_param._backward_hooks
    if hooks:
        plain._backward_hooks = hooks
    post = unit.post_hooks.get(name)
    if post:
        plain._post_accumulate_grad_hooks = post  # type: ignore[attr-defined]
    return plain


def _swap(param: ShardTensor, plain: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        set_own_grad(param, None)
        hooks: Any = plain._backward_hooks
        torch.utils.swap_tensors(param, plain)
        # swap_tensors leaves backward hooks with the Python object: those are the engine's own, and the next engine would
        # take them for the user's.
        param._backward_hooks = hooks
    # The ShardTensor is the object `plain` now, which goes away.
    assert not isinstance(param, ShardTensor)
