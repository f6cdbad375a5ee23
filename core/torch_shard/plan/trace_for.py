"""Traces the step of a plain model as it computes under the settings of an engine: in other dtypes, with recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..config.precision import precision_of
from ..config.shard_config import ShardConfig
from ..schedule.kept_inputs import checkpoint_keeping
from ..utils.layer_caches import without_cache
from ..utils.pytree import map_tensors, tensors_in
from .offloaded_inputs import OffloadedInputs
from .plan import Plan
from .step_trace import StepTrace
from .trace_step import trace_step


def trace_for(
    model: nn.Module,
    step: Callable[[nn.Module], object],
    plan: Plan,
    config: ShardConfig,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    optimizers: Iterable[torch.optim.Optimizer] = (),
    checkpointed: Iterable[nn.Module] = (),
    offloaded: bool = False,
) -> StepTrace:
    """Return what :func:`.trace_step.trace_step` returns, of a step in which parameters have the dtypes of gathered ones.

    Args:
        model: a plain module.
        step: what is to be traced; autocast is part of it.
        plan: the plan of the model.
        config: the settings that the plan was made with.
        device, optimizers: the arguments of ``trace_step``.
        checkpointed: modules of which only the inputs are kept for backward; everything in them is computed again.
        offloaded: these inputs wait for backward in host memory, as with ``activation_offload``.

    Raises:
        TraceError: as raised by ``trace_step``.
    """
    with computing_as(model, plan, config, checkpointed, offloaded) as dtypes:
        return trace_step(model, step, device=device, optimizers=optimizers, dtypes=dtypes)


@contextmanager
def computing_as(
    model: nn.Module,
    plan: Plan,
    config: ShardConfig,
    checkpointed: Iterable[nn.Module],
    offloaded: bool,
) -> Iterator[dict[str, torch.dtype]]:
    """Have a plain model compute as under the settings of an engine, and yield the dtypes of parameters that are cast."""
    with _casting(model, plan, config), _recomputed(checkpointed, OffloadedInputs() if offloaded else None):
        yield {p.name: p.dtypes.compute for p in plan.params if p.dtypes.casts}


@contextmanager
def _casting(model: nn.Module, plan: Plan, config: ShardConfig) -> Iterator[None]:
    """Let modules have their inputs cast as ``Precision.cast_inputs`` asks for."""
    precision = precision_of(config.precision)
    modules = dict(model.named_modules(remove_duplicate=False))
    kept = precision.kept_modules(model) if precision.cast_inputs else set()
    inside_kept = {module for top in kept for module in top.modules()}
    casting: dict[nn.Module, set[torch.dtype]] = {}  # the dtypes to which the units of a module are cast
    for unit in plan.units if precision.cast_inputs else ():
        computes = {p.dtypes.compute for p in unit.params if p.dtypes.casts}
        for name in {"", *(unit.triggers if precision.cast_inputs is True else ())}:
            casting.setdefault(modules[name], set()).update(computes)
    with ExitStack() as stack:
        for module in kept:
            given: list[torch.dtype | None] = []
            before = functools.partial(_keep_inputs, precision.stored_in(module), given)
            stack.enter_context(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            stack.enter_context(module.register_forward_hook(functools.partial(_keep_outputs, given)))
        for module, computes in casting.items():
            if module in inside_kept or not computes:
                continue
            compute = precision.param_dtype or min(computes, key=lambda each: each.itemsize)
            hook = functools.partial(_cast_inputs, compute)
            stack.enter_context(module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        if precision.output_dtype is not None:
            dtype = precision.output_dtype
            stack.enter_context(model.register_forward_hook(lambda _, args, output: _cast(output, dtype)))
        yield


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor

    return map_tensors(value, to_dtype)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _keep_inputs(
    dtype: torch.dtype, given: list[torch.dtype | None], module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Cast the inputs of a module that computes as it is stored; `given` gets the dtype that they had."""
    given.append(next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None))
    return _cast_inputs(dtype, module, args, kwargs)


def _keep_outputs(given: list[torch.dtype | None], module: nn.Module, args: Any, output: Any) -> Any:
    dtype = given.pop()
    return output if dtype is None else _cast(output, dtype)


@contextmanager
def _recomputed(modules: Iterable[nn.Module], offload: OffloadedInputs | None) -> Iterator[None]:
    """Let modules recompute what is in them."""
    with ExitStack() as stack:
        for module in modules:
            forward = functools.partial(_checkpointed, module, module.forward, offload)
            stack.enter_context(patch.object(module, "forward", forward))
        yield


def _checkpointed(
    module: nn.Module, forward: Callable[..., Any], offload: OffloadedInputs | None, *args: Any, **kwargs: Any
) -> Any:
    if not (module.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    kwargs = without_cache(module, kwargs)
    if offload is None:
        return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=False)
    return checkpoint_keeping(offload, forward, args, kwargs)
