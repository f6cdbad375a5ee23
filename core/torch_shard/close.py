"""``engine.close``: whole plain parameters again, inside the same Python objects."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .comm.consensus import agree
from .errors import UnitStateError
from .layout.dtensor_placement import is_dtensor, made_like, placed_of, replicated_like
from .optim.matrix import state as matrix_state
from .optim.registry import COUNTERS
from .runtime.runtime import Runtime
from .shard_tensor.tensor import ShardTensor
from .shard_tensor.unsharded_param import set_own_grad
from .state import optimizer_state
from .unit.flat_buffer import FlatBuffer
from .unit.full_values import whole_slices
from .unit.unit import OWN_ATTRIBUTES, Unit
from .unshard.full_values import gathered_values, local_grads


def close_units(
    runtime: Runtime, optimizers: Iterable[torch.optim.Optimizer] = (), model: nn.Module | None = None
) -> None:
    """Turn every sharded parameter into a whole plain ``nn.Parameter``, the same object. Collective.

    Values, gradients (reduced, whole), ``requires_grad``, attributes and hooks are kept; hooks see the local gradient
    and are called once ``.grad`` is accumulated, as in plain torch. Needs memory for the whole model on every rank.
    The state of `optimizers` becomes whole and plain too; that of any other optimizer stays cut and can't be used.

    Raises:
        UnitStateError: inside a forward or ``engine.gathered``, or where a parameter can't be swapped because of weak
            references to it or a live graph over it. Nothing has changed then.
    """
    error: Exception | None = None
    optimizers = list(optimizers)
    try:
        for unit in runtime.units:
            for flat in unit.flats:
                if flat.host is not None:
                    flat.host.moving.settle()  # until then it has weak references to what waits for it
            _check(unit)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(runtime, "engine.close", [type(o).__name__ for o in optimizers], error)
    left_out = [o for o in runtime.owners.optimizers() if not any(o is other for other in optimizers)]
    states = [(o, optimizer_state.optim_state_dict(runtime, o, False, model, own=True)) for o in optimizers]
    names = {id(p): name for unit in runtime.units for name, p in zip(unit.names, unit.params, strict=True)}
    if model is not None:
        names = {**{id(p): name for name, p in model.named_parameters()}, **names}
    runtime.schedule.release_unused()
    for unit in runtime.units:
        plain: list[tuple[ShardTensor, nn.Parameter]] = []
        with gathered_values(runtime, unit) as wholes:
            for flat, full in zip(unit.flats, wholes, strict=True):
                grads = whole_slices(flat, local_grads(flat), f"the gradients of unit {unit.name!r}")
                plain += [(p, _plain(unit, flat, full, i, grads[i])) for i, p in enumerate(flat.params)]
        rnns = [m for m, *_ in unit.places if isinstance(m, nn.RNNBase)]
        for module in rnns:
            module._flat_weights, module._flat_weight_refs = [], []
        for param, whole in plain:
            _swap(param, whole)
        unit.flats.clear()  # this frees the shards and everything gathered
        unit.places.clear()
        for module in dict.fromkeys(rnns):
            module._init_flat_weights()
    for optimizer, state in states:
        _give_back(optimizer, names, state["state"])
    if runtime.collectives.size > 1:
        for optimizer in left_out:
            if hasattr(optimizer, "register_step_pre_hook"):
                _NotGivenBack(optimizer, runtime.collectives.world_rank, set(names))
    runtime.units.clear()
    runtime.schedule.gathered.clear()
    runtime.in_backward = runtime.reductions.on_published = None


def _give_back(optimizer: torch.optim.Optimizer, names: dict[int, str], state: dict[str, Any]) -> None:
    """Whole state in place of slices. Not by ``load_state_dict``, which changes dtypes to the parameters'."""
    for group in optimizer.param_groups:
        counts_on_device = group.get("capturable") or group.get("fused")
        for p in group["params"]:
            if id(p) not in names:  # not the model's
                continue
            entries = state.get(names[id(p)])
            if entries:
                optimizer.state[p] = {
                    key: matrix_state.copied(value, "cpu" if key == "step" and not counts_on_device else str(p.device))
                    for key, value in entries.items()
                }
                if is_dtensor(p):
                    _distribute(p, optimizer.state[p])
            else:
                optimizer.state.pop(p, None)


def _distribute(param: Any, entries: dict[str, Any]) -> None:
    """Of whole state of a DTensor, what plain tensor parallelism would have made DTensors: torch computes with DTensors and plain
    tensors together only where those are 0-dim."""
    placed = placed_of(param, "")
    for key, value in entries.items():  # the key stays, so the dict may be gone through
        if isinstance(value, torch.Tensor) and optimizer_state.is_elementwise(param, key, value.shape):
            entries[key] = made_like(param, value)
        elif placed is not None and placed.part is None and key not in COUNTERS:
            # Of any shape: what optimizers of whole matrices keep. Every rank has all of the parameter, and so of its state.
            entries[key] = matrix_state.mapped(value, lambda whole: replicated_like(param, whole))


class _NotGivenBack:
    """On an optimizer of whole matrices that ``engine.close`` was not told of: its state has stayed with the owners, each
    rank would step plain parameters with a part of it or without, and replicas would differ without a word."""

    def __init__(self, optimizer: Any, rank: int, params: set[int]) -> None:
        """`params`: the ids of the closed engine's. (A weak reference would forbid to shard them again.)"""
        self._rank, self._params = rank, params
        self._handles = [
            optimizer.register_step_pre_hook(self.check),
            optimizer.register_load_state_dict_post_hook(self.remove),
        ]

    def check(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._params]
        if not held or any(isinstance(p, ShardTensor) for p in held):
            return  # another engine has them, which finds the state where it is
        name = type(optimizer).__name__
        raise UnitStateError(
            f"rank {self._rank}: {name}.step() on a model whose engine was closed without naming it, so each rank has the state "
            f"of some parameters only. Close with engine.close(optimizer), or load the optimizer's state, or make a new {name}. "
            "Nothing was changed."
        )

    def remove(self, _: Any) -> None:
        for handle in self._handles:
            handle.remove()


def _check(unit: Unit) -> None:
    rank = unit.collectives.world_rank
    unit.leave_interrupted()
    if unit.running or unit.is_summoned:
        raise UnitStateError(
            f"rank {rank}: engine.close() inside a forward or engine.gathered() of unit {unit.name!r}; leave it first."
        )
    rnn_refs = {
        id(r) for m, *_ in unit.places if isinstance(m, nn.RNNBase) for r in getattr(m, "_flat_weight_refs", ())
    }
    for name, param in zip(unit.names, unit.params, strict=True):
        if any(id(r) not in rnn_refs for r in weakref.getweakrefs(param)):
            raise UnitStateError(
                f"rank {rank}: {name} has weak references to it, which closing would break; drop them first."
            )
        with torch._C.DisableTorchFunctionSubclass():
            uses = param._use_count()  # type: ignore[attr-defined]
        if uses > 1:
            raise UnitStateError(
                f"rank {rank}: {name} is still held by an autograd graph; drop old losses and outputs (del loss) first."
            )


def _plain(unit: Unit, flat: FlatBuffer, full: torch.Tensor, index: int, grad: torch.Tensor | None) -> nn.Parameter:
    param, leaf, name = flat.params[index], flat.leaves[index], flat.layout.slots[index].name
    with torch.inference_mode(False), torch.no_grad():
        # Memory of its own, not a view: saving one parameter must not save its whole unit.
        values = flat.as_given(flat.view(full, index).clone(), index)
        with torch._C.DisableTorchFunctionSubclass():
            wants = param.requires_grad
        whole = nn.Parameter(values, requires_grad=wants)
        if grad is not None:
            whole.grad_dtype = grad.dtype
            whole.grad = flat.as_given(grad.clone(), index)
    for key, value in param.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            whole.__dict__[key] = value
    # The dicts themselves, so that the handles that users hold still remove their hooks.
    hooks: Any = leaf._backward_hooks
    if hooks:
        whole._backward_hooks = hooks
    post = unit.post_hooks.get(name)
    if post:
        whole._post_accumulate_grad_hooks = post  # type: ignore[attr-defined]
    return whole


def _swap(param: ShardTensor, whole: nn.Parameter) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        set_own_grad(param, None)
        hooks: Any = whole._backward_hooks
        torch.utils.swap_tensors(param, whole)
        # These stay with the Python object: here are the engine's own, which the next engine would take for the user's.
        param._backward_hooks = hooks
    # What was the ShardTensor is in `whole` now and goes away with it.
    assert not isinstance(param, ShardTensor)
