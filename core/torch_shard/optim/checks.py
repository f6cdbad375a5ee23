"""Checks before an optimizer's step, and the conversion of full state to shards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, NeedsGatherError, ShardError, UnitStateError
from ..grad_clip.checks import refuse_partials
from ..layout.dtensor_placement import is_dtensor
from ..numerics.stochastic_rounding import EXACT
from ..shard_tensor.spec import shard_of_part
from ..shard_tensor.state import is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad
from ..unit.unit import unit_of
from .engines_of_optimizer import open_runtime_of, params_of
from .registry import counters_in, is_counter

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime
    from ..unit.unit import Unit

_ZERO = "torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"


def refusal_of(optimizer: Any) -> str | None:
    """Return why an optimizer can't step on shards, whatever it is registered as, with the remedy; None where it may."""
    cls = type(optimizer)
    if any((base.__module__, base.__name__) == _ZERO for base in cls.__mro__):
        inner = getattr(optimizer, "_optim_constructor", None)
        return (
            f"{cls.__module__}.{cls.__qualname__} steps a part of the parameters on each rank, which has shards of "
            f"all of them. Use its inner optimizer ({getattr(inner, '__name__', 'optimizer_class')}) over all "
            "parameters: the engine shards optimizer state already."
        )
    # Kind "matrix" would not do either: overrides of settings (GlobalOptimManager) go by the identity of parameters.
    if not any(base.__module__.split(".")[0] == "bitsandbytes" for base in cls.__mro__):
        return None
    name = cls.__name__.removesuffix("8bit").removesuffix("32bit")
    use = f"torch.optim.{name}" if hasattr(torch.optim, name) else "an optimizer of torch.optim"
    return (
        f"{cls.__module__}.{cls.__qualname__} passes the addresses of full parameters to kernels that quantise state in blocks. "
        f"Use {use}; for state in 8 bits torchao.optim.AdamW8bit, which steps on full parameters here."
    )


def check_class(optimizer: Any, rank: int) -> None:
    """Raise if an optimizer can't be right on shards.

    Raises:
        ShardError: the optimizer needs all parameters at once, or the addresses of full ones, or steps other parameters on each
            rank, or has `differentiable` set.
    """
    cls = type(optimizer)
    name = f"rank {rank}: {cls.__module__}.{cls.__qualname__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NeedsGatherError(
            f"{name} works on all parameters as one vector, which no rank has. Use another optimizer; an update of your own from "
            "full parameters and gradients goes inside `with engine.gathered(write=True, grads=True):`. Nothing was changed."
        )
    why = refusal_of(optimizer)
    if why is not None:
        raise ShardError(f"rank {rank}: {why} Nothing was changed.")
    for number, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise ShardError(
                f"{name}: parameter group {number} has differentiable=True, but a sharded parameter's update can't be "
                "recorded by autograd. Set it to False. Nothing was changed."
            )


def units_of(optimizer: Any) -> list[Unit]:
    """Return the units whose parameters the optimizer holds, of any engine."""
    return list(dict.fromkeys(filter(None, map(unit_of, params_of(optimizer)))))


def refuse_others(optimizer: Any, runtime: Runtime, what: str) -> None:
    """Raise if an optimizer that steps during this engine's backward holds parameters of another engine.

    `what` is the beginning of the message.

    Raises:
        ConfigError: the optimizer holds such a parameter, which the error names.
    """
    for p in params_of(optimizer):
        other = open_runtime_of(p)
        if other is not None and other is not runtime:
            raise ConfigError(
                f"rank {runtime.collectives.world_rank}: {what}{type(optimizer).__name__} holds parameters of two sharded "
                f"models, {p._spec.name} among them, and a step during the backward of one would be half of a step. Make "
                "an optimizer for each of them, or leave engine.step_in_backward() out. Nothing was changed."
            )


def check_units(optimizer: Any, units: Iterable[Unit]) -> None:
    """Raise if a step begins inside ``engine.gathered``.

    Raises:
        UnitStateError: a unit is gathered there, and its values would overwrite the step.
    """
    for unit in units:
        if unit.is_summoned:
            raise UnitStateError(
                f"rank {unit.collectives.world_rank}: {type(optimizer).__name__}.step() inside engine.gathered() of unit "
                f"{unit.name!r}, where parameters are full and shards out of date; step outside. Nothing was changed."
            )


def refuse_repeated(optimizer: Any) -> None:
    """Raise if an optimizer lists a sharded parameter more than once, for which torch warns of a later error.

    Raises:
        ConfigError: names the parameter.
    """
    params = params_of(optimizer)
    if len(params) == len(set(map(id, params))):
        return
    counts = Counter(map(id, params))
    for p in params:
        if counts[id(p)] > 1 and isinstance(p, ShardTensor):
            raise ConfigError(
                f"rank {p._spec.world_rank}: {type(optimizer).__qualname__} lists {p._spec.name} more than once; list each "
                "parameter once. Nothing was changed."
            )


def refuse_without_rounding(optimizer: Any, runtime: Runtime) -> None:
    """Raise for an optimizer that would step on the ShardTensors themselves, where steps are rounded stochastically.

    Raises:
        ConfigError: its updates would be rounded to nearest.
    """
    for p in params_of(optimizer):
        unit = unit_of(p)
        if unit is None or unit.runtime is not runtime or unit.find(p)[0].rounding is None:
            continue
        name = type(optimizer).__qualname__
        raise ConfigError(
            f"rank {p._spec.world_rank}: precision.stochastic_rounding with {name}, an optimizer that the engine does not know: "
            f"it would step on {p._spec.name} as it is stored, in bfloat16, and round to nearest. Declare how it steps: "
            f"torch_shard.optim.register({name}, kind=...). Nothing was changed."
        )


def refuse_unreduced(optimizer: Any, runtime: Runtime) -> None:
    """Raise if gradients are not reduced: each rank would step its shard with a gradient of its own.

    Raises:
        ShardError: a gradient waits for its reduction, or for the end of an accumulation.
    """
    if not runtime.holds_gradients():
        return
    refuse_partials(runtime, params_of(optimizer), "optimizer.step()")
    for p in params_of(optimizer):
        if not isinstance(p, ShardTensor):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            unit = unit_of(p) if is_unreduced(own_grad(p)) else None
            if unit is None or unit.runtime is not runtime:
                continue
            flat, index = unit.find(p)
            held = flat.gradients.accumulation.holds(index)
        if held:
            raise ShardError(
                f"rank {p._spec.world_rank}: optimizer.step() can't use the gradient of {p._spec.name}, which is not reduced "
                "yet, because every backward since zero_grad() ran under no_sync(). Run the last backward, with its forward, "
                "outside no_sync()."
            )


def shard_state(optimizer: Any, runtime: Runtime) -> None:
    """Replace full plain tensors in the state of this runtime's parameters by this rank's shards of them. Not collective.

    Such state is from before sharding, or from a plain checkpoint.
    """
    state = optimizer.state
    if not state:
        return
    params = params_of(optimizer)
    with torch._C.DisableTorchFunctionSubclass():
        counters = counters_in((p, state.get(p)) for p in params)
    for p in params:
        own = state.get(p) if isinstance(p, ShardTensor) else None
        if not isinstance(own, dict):
            continue
        for key, value in own.items():  # values may be replaced in the loop, since the keys stay
            # Counters are full on every rank, those of 0-dim parameters, too.
            if (
                not (type(value) is torch.Tensor or is_dtensor(value))
                or is_counter(key, value.shape, counters)
                or value.shape != p._spec.shape
            ):
                continue
            unit = unit_of(p)
            if unit is None or unit.runtime is not runtime or unit.is_summoned:
                break
            own[key] = _shard_of(value, p)


def widen_state(entries: Any) -> None:
    """Convert a parameter's state to fp32, which is exact, where steps are rounded stochastically.

    The state may be from steps in bf16, or the user may have made it in the parameter's dtype.
    """
    for key, value in entries.items() if isinstance(entries, dict) else ():
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.bfloat16, torch.float16):
            continue
        if isinstance(value, ShardTensor):
            entries[key] = ShardTensor._wrap(value._local.to(EXACT), value._spec)
        else:
            entries[key] = value.to(EXACT)


def state_dtype(param: Any) -> torch.dtype:
    """Return the dtype of optimizer state that has its parameter's dtype in plain torch."""
    unit = unit_of(param)
    rounds = unit is not None and unit.rounding and unit.find(param)[0].rounding is not None
    dtype: torch.dtype = EXACT if rounds else param.dtype
    return dtype


def _shard_of(value: torch.Tensor, param: ShardTensor) -> ShardTensor:
    unit = unit_of(param) if is_dtensor(value) else None
    if unit is not None:
        flat, index = unit.find(param)
        return ShardTensor(shard_of_part(flat.part_of(value, index), param._spec).clone(), param._spec)
    return ShardTensor.from_full(value.to(param._local.device), param._spec)
