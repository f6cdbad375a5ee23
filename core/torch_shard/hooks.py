"""The module hooks: objects, so that they copy with the model and a deepcopy is an independent sharded model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from . import casting
from .agreement import forget_loads
from .runtime import Runtime
from .unit import Unit


# torch.compiler.disable without importing the compiler here (which is loaded by the first optimizer anyway). Private;
# torch 2.13.
@torch._disable_dynamo  # type: ignore[attr-defined]
def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call it past the compiler."""
    return function(*args)


# What torch.compile(fullgraph=True) gives as the reason why it can't; private, too.
uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
uncompiled._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "torch_shard gathers and releases parameters here, which is done between graphs: each unit breaks the graph once. Leave out "
    "fullgraph=True, or compile modules that are smaller than a unit"
)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Inside a compiled module, every function that a hook calls would be compiled, too."""
    # The wrapper that forbids it costs several microseconds: only where a compiler is at work.
    return uncompiled(function, *args) if torch.compiler.is_compiling() else function(*args)


class EnterUnit:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, module: nn.Module, args: Any) -> None:
        _call(self.unit.runtime.forwards.enter, self.unit)


class ExitUnit:
    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _call(self.unit.runtime.forwards.exit, self.unit, output)


class BeginModel:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self, module: nn.Module, args: Any) -> None:
        _call(self.runtime.forwards.begin, module)


class FinishModel:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        _call(self.runtime.forwards.finish)


def register(root: nn.Module, runtime: Runtime, units: Iterable[Unit]) -> None:
    """Hook the root and every trigger."""
    runtime.registrations.root = weakref.ref(root)
    runtime.registrations.changed = False
    for unit in units:
        for module in unit.triggers:
            module.register_forward_pre_hook(EnterUnit(unit), prepend=True)
            module.register_forward_hook(ExitUnit(unit), always_call=True)
    root.register_forward_pre_hook(BeginModel(runtime), prepend=True)
    root.register_forward_hook(FinishModel(runtime), always_call=True)


def unregister(root: nn.Module, units: Iterable[Unit]) -> None:
    """Remove the hooks of :func:`register`, also from a copied model, which has no handles to them."""
    forget_loads(root)
    casting.unregister(root)
    modules = {id(m): m for m in [root, *(t for u in units for t in u.triggers)]}
    for module in modules.values():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, h in hooks.items() if isinstance(h, (EnterUnit, ExitUnit, BeginModel, FinishModel))]:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
