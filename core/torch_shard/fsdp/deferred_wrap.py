"""Wrapped modules, and when the model around them is sharded.

``FSDP(layer)`` and ``fully_shard(layer)`` can't know whether a module around the layer will be wrapped later. So they leave a
mark on the layer. The outermost wrapped module is sharded when it is first needed: by its forward or that of a wrapped module
inside, by a state dict, or by a method that communicates. All ranks come there at the same point of the program. Until then
parameters are plain.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..comm.streams import on_device
from ..engine import Engine, engine_of, shard
from ..errors import ConfigError, SetupError, ShardError
from ..runtime.forward_hooks import uncompiled
from ..runtime.mixed_precision_hooks import cast_root_outputs
from ..shard_tensor.tensor import ShardTensor
from ..state_dict_type import StateDictType, set_state_dict_type
from ..unshard.gathered import units_of
from . import auto_wrap, dcp_patch
from .translate_settings import Request, config_of, unused

_KEY = "_torch_shard_fsdp"


class Mark:
    """The request for a wrapped module, and the settings that its methods have made since."""

    def __init__(self, module: nn.Module, request: Request) -> None:
        self.module = weakref.ref(module)
        self.request = request
        self.outer: weakref.ref[nn.Module] | None = None  # the nearest wrapped module around this one
        self.sync = True  # backward reduces gradients
        self.divisor: float | None = None  # the divisor of the sum of gradients, in place of the number of ranks
        self.prefetch = 0  # the number of units that a method has asked for
        self.had_grads = any(p.grad is not None for p in module.parameters())
        self.opened: contextlib.ExitStack | None = None  # the gather that FSDPModule.unshard has opened
        self.was_sharded = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        module = self.module()
        assert module is not None
        other = copy.copy(self)
        memo[id(self)] = other
        other.module = weakref.ref(copy.deepcopy(module, memo))
        # A copy of a part of a model is a model by itself.
        outer = self.outer() if self.outer is not None else None
        other.outer = weakref.ref(memo[id(outer)]) if outer is not None and id(outer) in memo else None
        ignored = tuple(copy.deepcopy(entry, memo) for entry in self.request.ignored)
        other.request = dataclasses.replace(self.request, ignored=ignored)
        other.opened = None
        if other.outer is None and engine_of(module) is None:
            _pending.add(other.module())  # type: ignore[arg-type]
        return other


def mark_of(module: nn.Module) -> Mark | None:
    """Return the mark of a module, or None if it is not wrapped."""
    found = module.__dict__.get(_KEY)
    return found if isinstance(found, Mark) else None


def mark_on(module: nn.Module) -> Mark:
    """Return the mark of a wrapped module."""
    found: Mark = module.__dict__[_KEY]
    return found


def leave_mark(module: nn.Module, request: Request) -> None:
    """Mark `module`, which is sharded later; wrapped modules inside it become parts of the same model. Not collective.

    Raises:
        ConfigError: a parameter is sharded already, or the module is inside several wrapped modules, none of which is around the
            others.
    """
    for name, p in module.named_parameters():
        if isinstance(p, ShardTensor) and p._unit_ref is not None:
            raise ConfigError(
                f"{request.api}: {name} is a parameter of a model that is sharded already. Wrap all modules before the first "
                "forward, and give auto_wrap_policy to the outermost one only."
            )
    around = _around(module, request)
    mark = Mark(module, request)
    # nn.Module.__setattr__ is avoided: a mark is neither a submodule nor in the state dict.
    module.__dict__[_KEY] = mark
    for _, part, nested in marks_in(module):
        if nested.outer is None or nested.outer() is around:
            nested.outer = weakref.ref(module)
            _pending.discard(_plain(part))
    module.register_forward_pre_hook(ShardFirst(), prepend=True, with_kwargs=True)
    if around is None:
        _pending.add(module)
    else:  # the outer module was wrapped first
        mark.outer = weakref.ref(around)
    _watch_steps()
    dcp_patch.install()  # a state dict may be the first use of the model


def _around(module: nn.Module, request: Request) -> nn.Module | None:
    """Return the nearest wrapped module around `module`, of a model that is not sharded yet; None if there is none."""
    roots = [root for root in _pending if _holds(root, module)]
    if len(roots) > 1:
        raise ConfigError(
            f"{request.api}: this {type(module).__name__} is a part of {len(roots)} modules that were wrapped one by one. Wrap a "
            "module that contains all of them, or give each a layer of its own."
        )
    if not roots:
        return None
    # Inner modules come later.
    return [*roots, *(_plain(part) for _, part, _ in marks_in(roots[0]) if _holds(part, module))][-1]


def _holds(root: nn.Module, module: nn.Module) -> bool:
    """Return True if `module`, or its FullyShardedDataParallel, is inside `root`.

    This is asked for all pairs of wrapped modules, and is faster than ``modules()``.
    """
    left, seen = [root], {id(root)}
    while left:
        for child in left.pop()._modules.values():
            if child is not None and id(child) not in seen:
                if child.__dict__ is module.__dict__:
                    return True
                seen.add(id(child))
                left.append(child)
    return False


def marks_in(module: nn.Module) -> list[tuple[str, nn.Module, Mark]]:
    """Return the wrapped modules inside `module`, without itself, with their names and marks, outer ones first."""
    inside = ((name, m, mark_of(m)) for name, m in module.named_modules() if m.__dict__ is not module.__dict__)
    return [(name, m, mark) for name, m, mark in inside if mark is not None]


def _plain(module: nn.Module) -> nn.Module:
    """Return the module over which `module` is a FullyShardedDataParallel, else `module`."""
    mark = mark_of(module)
    found = None if mark is None else mark.module()
    return module if found is None else found


def root_of(module: nn.Module) -> nn.Module:
    """Return the outermost module around a wrapped one that is wrapped by now."""
    module = _plain(module)
    mark = mark_of(module)
    while mark is not None and mark.outer is not None:
        outer = mark.outer()
        if outer is None:  # it was deleted
            break
        module, mark = outer, mark_of(outer)
    return module


def nested_name(module: nn.Module) -> str:
    """Return the name of a wrapped module within its root, for messages."""
    root = root_of(module)
    return next((name for name, m in root.named_modules() if m.__dict__ is module.__dict__), "")


def own_params(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a wrapped module that are in no wrapped module inside it."""
    inner = {id(p) for _, part, _ in marks_in(module) for p in part.parameters()}
    return [p for p in module.parameters() if id(p) not in inner]


# -- sharding -----------------------------------------------------------------------------------------------------------


def is_pending(module: nn.Module) -> bool:
    """Return True if a wrapped module is not sharded yet; False after ``engine.close()``, which has made it plain again."""
    root = root_of(module)
    return engine_of(root) is None and not mark_on(root).was_sharded


def engine_around(module: nn.Module, filled_later: Set[int] | None = None) -> Engine:
    """Return the engine of a wrapped module's root. Shard the root if it is not sharded yet, which is collective.

    Args:
        module: the wrapped module.
        filled_later: the ids of parameters and buffers that the caller gives values, so that those on meta may be zeros before.
            It may differ between ranks, but is None on all of them or on none.

    Raises:
        ConfigError: the engine was closed.
    """
    root = root_of(module)
    engine = engine_of(root)
    if engine is not None:
        return engine
    if mark_on(root).was_sharded:
        raise ConfigError("engine.close() has made this model a plain one; torch_shard.shard() shards it again.")
    return _shard(root, filled_later)


_Overriding = Callable[[nn.Module, Mapping[str, Any]], dict[str, Any]]
_overriding: _Overriding = lambda model, own: dict(own)  # noqa: E731


def override_settings(overriding: _Overriding) -> None:
    """Let `overriding` change the arguments of ``shard`` for each model that is about to be sharded."""
    global _overriding
    _overriding = overriding


def _shard(root: nn.Module, filled_later: Set[int] | None) -> Engine:
    mark = mark_on(root)
    request = mark.request
    # The user may have registered a wrapper in only some of its layer's places, so that parameters would be installed twice.
    auto_wrap.register(root, [m for m in root.modules() if _plain(m) is not m])
    inside = marks_in(root)
    _refuse_own_grads(root, mark)
    nested_requests = {name: (part, nested.request) for name, part, nested in inside}
    settings, outputs = config_of(root, request, nested_requests, filled_later)
    settings["prefetch"] = max(settings["prefetch"], mark.prefetch, *(nested.prefetch for *_, nested in inside))
    settings = _overriding(root, settings)
    casts = {name: partial(cast_root_outputs, dtype) for name, dtype in outputs.items()}
    handles = [root.get_submodule(name).register_forward_hook(hook) for name, hook in casts.items()]
    device = request.device
    try:
        # The first forward may be under inference_mode, and the buffers must be ordinary tensors.
        with torch.inference_mode(False), on_device(device):
            engine = shard(root, mesh=request.mesh, **settings)
    except BaseException:
        for handle in handles:
            handle.remove()
        raise
    if device is not None and engine.device != device:
        unused(request.api, device_id=f"the model and its process group are on {engine.device}")
    for module in root.modules():
        for key in [k for k, hook in module._forward_pre_hooks.items() if isinstance(hook, ShardFirst)]:
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    _pending.discard(root)
    mark.was_sharded = True
    apply_sync(root)
    for module, each in [(root, mark), *((part, nested) for _, part, nested in inside)]:
        if each.divisor is not None:
            divide_by(engine, module, each.divisor)
    if request.strategy is not None:  # FullyShardedDataParallel's own default
        set_state_dict_type(root, StateDictType.FULL_STATE_DICT)
    return engine


def _refuse_own_grads(root: nn.Module, mark: Mark) -> None:
    grads = [name for name, p in root.named_parameters() if p.grad is not None and _is_not_zero(p.grad)]
    if not mark.had_grads and grads:
        raise SetupError(
            f"{mark.request.api}: {grads[0]} got a gradient between the call that wrapped the model and its first forward; it is "
            "this rank's alone. Compute through the wrapped module, or clear gradients before its first forward."
        )


def _is_not_zero(grad: torch.Tensor) -> bool:
    return grad.device.type != "meta" and bool(grad.count_nonzero())


class ShardFirst:
    """A forward pre-hook of wrapped modules that shards the model before the first forward."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        before = set(module._forward_pre_hooks)
        uncompiled(engine_around, module)
        # The running call does not know the hooks that the engine has just registered.
        for key, hook in list(module._forward_pre_hooks.items()):
            if key in before:
                continue
            if key in module._forward_pre_hooks_with_kwargs:
                given: Any = hook(module, args, kwargs)  # type: ignore[call-arg]
                args, kwargs = (args, kwargs) if given is None else given
            else:
                given = hook(module, args)  # type: ignore[call-arg]
                if given is not None:
                    args = given if isinstance(given, tuple) else (given,)
        return args, kwargs


# -- a step before the first forward ------------------------------------------------------------------------------------

# The modules that will be sharded at their first use. An optimizer step on their parameters before that is refused.
_pending: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raise a ShardError if `optimizer` has a gradient of a wrapped model that was not used yet: it was never reduced."""
    if not _pending:
        return
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for module in list(_pending) if held else ():
        for name, p in module.named_parameters():
            if id(p) in held and not isinstance(p, ShardTensor) and _is_not_zero(p.grad):  # type: ignore[arg-type]
                raise ShardError(
                    f"optimizer.step() before the first forward of the wrapped {type(module).__name__}: the gradient of "
                    f"{name} is this rank's alone. Compute through the wrapped module, or make another method count as its "
                    "forward with register_fsdp_forward_method."
                )


# -- what methods set ---------------------------------------------------------------------------------------------------


def _set_sync(engine: Engine, value: bool) -> None:
    """Set whether the next backward reduces gradients. As in torch's FSDP, backward decides, not its forward."""
    runtime = engine._runtime
    runtime.require_sync = runtime.forward_sync = value


@contextlib.contextmanager
def without_sync(engine: Engine) -> Iterator[None]:
    """Accumulate gradients on this rank inside."""
    before = engine.require_backward_grad_sync
    _set_sync(engine, False)
    try:
        yield
    finally:
        _set_sync(engine, before)


def apply_sync(module: nn.Module) -> None:
    """Defer all reductions of a sharded model, or of a copy of one, while one of its wrapped modules is set not to reduce.

    The deferred gradients are summed and reduced later, with the same result, and a step in between is refused. Modules that are
    not sharded models are left alone.
    """
    engine, own = engine_of(module), mark_of(module)
    if engine is not None and own is not None:
        _set_sync(engine, own.sync and all(mark.sync for *_, mark in marks_in(module)))


def divide_by(engine: Engine, module: nn.Module, divisor: float) -> None:
    """Divide the sum of the gradients of a wrapped module's own parameters by `divisor`.

    Raises:
        ConfigError: a communication hook reduces the gradients.
        ShardError: reductions are deferred, of gradients that may be divided already.
    """
    gradients = [flat.gradients for unit in units_of(engine._runtime, own_params(module)) for flat in unit.flats]
    if any(g.hook is not None for g in gradients):
        raise ConfigError("set_gradient_divide_factor: a communication hook is registered, and divides by itself.")
    if any(g.waits for g in gradients):
        raise ShardError(
            f"rank {engine.rank}: set_gradient_divide_factor while gradients wait for their reduction, which may be divided "
            "already; set it before the first backward, or after one that reduces."
        )
    for g in gradients:
        g.divide_by(divisor)
