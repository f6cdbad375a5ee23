"""Hooks that cast modules' inputs and outputs to the dtypes of :class:`~torch_shard.config.precision.Precision`.

The hooks are objects, so that they are copied with the model.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.precision import Precision
from ..shard_tensor.tensor import ShardTensor
from ..utils.pytree import replace, tensors_in

if TYPE_CHECKING:
    from ..unit.unit import Unit

__all__ = ["cast", "moved", "register", "unregister"]

_DEPTH = 8


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors in `dtype`; a container in which something changes is copied.

    This looks into tuples, lists, dicts and dataclasses. Other objects (a cache that the forward fills, say) stay as they are.
    """

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        plain = not isinstance(tensor, ShardTensor) and tensor.is_floating_point() and tensor.element_size() > 1
        return tensor.to(dtype) if plain else tensor

    return _changed(value, to_dtype, _DEPTH)


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with tensors that are on the CPU moved to `device`; looks into the same containers as :func:`cast`."""

    def to_device(tensor: torch.Tensor) -> torch.Tensor:
        plain = not isinstance(tensor, ShardTensor) and tensor.device.type == "cpu"
        return tensor.to(device, non_blocking=True) if plain else tensor

    return _changed(value, to_device, _DEPTH)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if depth == 0:
        return value
    if type(value) in (tuple, list) or isinstance(value, tuple):
        items = [_changed(item, change, depth - 1) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {k: new for k, v in value.items() if (new := _changed(v, change, depth - 1)) is not v}
        if changed:
            value = copy.copy(value)
            for key, new in changed.items():
                value[key] = new
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        changed = {k: new for k in names if (new := _changed(old := getattr(value, k), change, depth - 1)) is not old}
        if changed:
            value = copy.copy(value)  # not dataclasses.replace, which runs __init__ again
            for key, new in changed.items():
                object.__setattr__(value, key, new)
    return value


def cast_outputs(value: Any, dtype: torch.dtype) -> Any:
    """Return `value`, the result of a forward, with its floating-point tensors in `dtype`; looks into every object."""
    found = [t for t in tensors_in(value) if t.is_floating_point() and t.element_size() > 1 and t.dtype != dtype]
    return replace(value, {id(t): t.to(dtype) for t in found if not isinstance(t, ShardTensor)}) if found else value


class CastInputs:
    """A pre-hook that casts the inputs of a module of `units` to the dtype of the computation.

    Inside ``engine.gathered`` parameters have the dtype in which they are stored, and so have the inputs.
    """

    def __init__(self, units: list[Unit], compute: torch.dtype, stored: torch.dtype) -> None:
        self.units, self.compute, self.stored = units, compute, stored

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        dtype = self.stored if all(unit.is_summoned for unit in self.units) else self.compute
        return cast(args, dtype), cast(kwargs, dtype)


class MoveInputs:
    """A pre-hook of the root module that moves inputs on the CPU to the device that computes.

    It is there where parameters are in host memory, so that the model appears to be on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return moved(args, self.device), moved(kwargs, self.device)


class KeepIn:
    """A pre-hook that casts the inputs of a module that computes in the dtype in which it is stored."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.given: list[torch.dtype | None] = []  # the inputs' dtypes of the running forwards, the innermost last

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        given = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)] or tensors_in((args, kwargs))
        self.given.append(next((t.dtype for t in given if t.is_floating_point()), None))
        return cast(args, self.dtype), cast(kwargs, self.dtype)


class KeepOut:
    """A forward hook beside :class:`KeepIn` that casts the outputs to the dtype that the inputs had.

    It is called also when the forward has raised.
    """

    def __init__(self, before: KeepIn) -> None:
        self.before = before

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        dtype = self.before.given.pop() if self.before.given else None
        return output if dtype is None or output is None else cast_outputs(output, dtype)


class CastOutputs:
    """A forward hook that casts the outputs of the root module."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return cast_outputs(output, self.dtype)


_HOOKS = (CastInputs, MoveInputs, KeepIn, KeepOut, CastOutputs)


def register(root: nn.Module, units: list[Unit], precision: Precision) -> None:
    """Hook the modules of `root` as `precision` asks for, before the hooks that unshard."""
    kept = precision.kept_modules(root)
    inside_kept = {m for top in kept for m in top.modules()}
    if precision.cast_inputs:
        for module in kept:
            before = KeepIn(_stored(module, precision))
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(KeepOut(before), always_call=True)
    if precision.cast_inputs:
        triggers: dict[nn.Module, list[Unit]] = {root: list(units)}
        for unit in units if precision.cast_inputs is True else ():
            for module in unit.triggers:
                if module is not root:
                    triggers.setdefault(module, []).append(unit)
        for module, own in triggers.items():
            dtypes = {flat.compute for unit in own for flat in unit.flats if flat.casts}
            if module in inside_kept or not dtypes:
                continue
            compute = precision.param_dtype or min(dtypes, key=lambda dtype: dtype.itemsize)
            hook = CastInputs(own, compute, _stored(module, precision))
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    device = units[0].collectives.device if units else None
    if device is not None and device.type != "cpu" and units[0].host is not None:
        root.register_forward_pre_hook(MoveInputs(device), prepend=True, with_kwargs=True)
    if precision.output_dtype is not None:
        root.register_forward_hook(CastOutputs(precision.output_dtype))


def unregister(root: nn.Module) -> None:
    """Remove the hooks of :func:`register`."""
    for module in root.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [k for k, h in hooks.items() if isinstance(h, _HOOKS)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


def _stored(module: nn.Module, precision: Precision) -> torch.dtype:
    """Return the dtype in which the parameters of `module` are stored."""
    for p in module.parameters():
        dtypes = precision.dtypes(p.dtype, p.requires_grad, True)
        if p.is_floating_point() and p.element_size() > 1:
            return dtypes.stored
    return precision.master_dtype or torch.get_default_dtype()
