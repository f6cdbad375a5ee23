"""Hooks that cast modules' inputs and outputs to the dtypes of :class:`~torch_shard.config.precision.Precision`.

The hooks are partials of functions, so that they are copied with the model, and what they hold with them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.precision import Precision
from ..shard_tensor.tensor import ShardTensor
from ..utils.pytree import map_tensors, replace, tensors_in

if TYPE_CHECKING:
    from ..unit.unit import Unit


def _is_wide_float(tensor: torch.Tensor) -> bool:
    """Return True for a floating-point tensor of at least 16 bits that is not sharded."""
    return not isinstance(tensor, ShardTensor) and tensor.is_floating_point() and tensor.element_size() > 1


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` with its floating-point tensors in `dtype`; a container in which something changes is copied.

    This looks into tuples, lists, dicts and dataclasses. Other objects (a cache that the forward fills, say) stay as they are.
    """
    return map_tensors(value, lambda t: t.to(dtype) if _is_wide_float(t) else t)


def moved(value: Any, device: torch.device) -> Any:
    """Return `value` with tensors that are on the CPU moved to `device`; looks into the same containers as :func:`cast`."""
    # Without `non_blocking`: the program may write to page-locked memory of its own as soon as the forward returns.
    return map_tensors(value, lambda t: t if isinstance(t, ShardTensor) or t.device.type != "cpu" else t.to(device))


def cast_outputs(value: Any, dtype: torch.dtype) -> Any:
    """Return `value`, the result of a forward, with its floating-point tensors in `dtype`; looks into every object."""
    found = {id(t): t.to(dtype) for t in tensors_in(value) if _is_wide_float(t) and t.dtype != dtype}
    return replace(value, found) if found else value


def cast_inputs(
    units: list[Unit], compute: torch.dtype, stored: torch.dtype, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Cast the inputs of a module of `units` to the dtype of the computation; a pre-hook.

    Inside ``engine.gathered`` parameters have the dtype in which they are stored, and so have the inputs.
    """
    dtype = stored if all(unit.is_summoned for unit in units) else compute
    return cast(args, dtype), cast(kwargs, dtype)


def move_inputs(device: torch.device, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Move inputs of the root module that are on the CPU to `device`, which computes; a pre-hook.

    It is there where parameters are in host memory, so that the model appears to be on the CPU.
    """
    return moved(args, device), moved(kwargs, device)


def keep_inputs(
    stored: torch.dtype, given: list[torch.dtype | None], module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Cast the inputs of a module that computes in the dtype in which it is `stored`; a pre-hook.

    `given` gets the dtype that the inputs had, behind those of other running forwards.
    """
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)] or tensors_in((args, kwargs))
    given.append(next((t.dtype for t in tensors if t.is_floating_point()), None))
    return cast(args, stored), cast(kwargs, stored)


def keep_outputs(given: list[torch.dtype | None], module: nn.Module, args: Any, output: Any) -> Any:
    """Cast the outputs to the dtype that the inputs had before :func:`keep_inputs`; also called when the forward has raised."""
    dtype = given.pop() if given else None
    return output if dtype is None or output is None else cast_outputs(output, dtype)


def cast_root_outputs(dtype: torch.dtype, module: nn.Module, args: Any, output: Any) -> Any:
    """Cast the outputs of the root module; a forward hook."""
    return cast_outputs(output, dtype)


HOOKS = (cast_inputs, move_inputs, keep_inputs, keep_outputs, cast_root_outputs)
"""The functions whose partials are hooks."""


def register(root: nn.Module, units: list[Unit], precision: Precision) -> None:
    """Hook the modules of `root` as `precision` asks for, before the hooks that unshard."""
    kept = precision.kept_modules(root)
    inside_kept = {m for top in kept for m in top.modules()}
    if precision.cast_inputs:
        for module in kept:
            given: list[torch.dtype | None] = []
            before = partial(keep_inputs, precision.stored_in(module), given)
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(partial(keep_outputs, given), always_call=True)
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
            hook = partial(cast_inputs, own, compute, precision.stored_in(module))
            module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    device = units[0].collectives.device if units else None
    if device is not None and device.type != "cpu" and units[0].host is not None:
        root.register_forward_pre_hook(partial(move_inputs, device), prepend=True, with_kwargs=True)
    if precision.output_dtype is not None:
        root.register_forward_hook(partial(cast_root_outputs, precision.output_dtype))
