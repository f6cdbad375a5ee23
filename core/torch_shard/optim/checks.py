"""What an optimizer's step is refused for, and what is put right before one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, NeedsGatherError, ShardError, UnitStateError
from ..grad_clip.checks import refuse_unfinished
from ..layout.dtensor_placement import is_dtensor
from ..shard_tensor.spec import shard_of_part
from ..shard_tensor.state import is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad
from ..unit.unit import unit_of
from .engines_of_optimizer import params_of, runtime_of
from .registry import COUNTERS, is_torchs

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime
    from ..unit.unit import Unit

__all__ = [
    "check_class",
    "check_units",
    "refusal_of",
    "refuse_offloaded",
    "refuse_others",
    "refuse_twice",
    "refuse_unreduced",
    "refuse_without_rounding",
    "shard_state",
    "units_of",
]


# Its kernels work on what they take for whole parameters, and overrides of settings (GlobalOptimManager) go by the identity of
# parameters, which in a step on whole matrices are others.
_REFUSED = "bitsandbytes"


def refusal_of(optimizer: Any) -> str | None:
    """Return why an optimizer can't step on shards, whatever it is registered as, with the remedy; None where it may."""
    cls = type(optimizer)
    if not any(base.__module__.split(".")[0] == _REFUSED for base in cls.__mro__):
        return None
    name = cls.__name__.removesuffix("8bit").removesuffix("32bit")
    use = f"torch.optim.{name}" if hasattr(torch.optim, name) else "an optimizer of torch.optim"
    # `optim_bits=8` is the same as a class of that name.
    if cls.__name__.endswith("8bit") or getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8:
        why = "quantises its state in blocks, and decides by a tensor's size whether to; both would depend on the number of ranks"
        use += "; for state in 8 bits torchao.optim.AdamW8bit, which steps on whole parameters here"
    else:
        why = "passes the addresses of whole parameters to its kernels"
    return f"{cls.__module__}.{cls.__qualname__} {why}. Use {use}."


def check_class(optimizer: Any, rank: int) -> None:
    """Refuse what can't be right on slices.

    Raises:
        ShardError: an optimizer that needs all parameters at once or the addresses of whole ones, or `differentiable`.
    """
    cls = type(optimizer)
    name = f"rank {rank}: {cls.__module__}.{cls.__qualname__}"
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NeedsGatherError(
            f"{name} works on all parameters as one vector, which no rank has. Use another optimizer; an update of your own from "
            "whole parameters and gradients goes inside `with engine.gathered(write=True, grads=True):`. Nothing was changed."
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
    """Return the units whose parameters the optimizer holds, of whatever engine."""
    found: dict[int, Unit] = {}
    for p in params_of(optimizer):
        unit = unit_of(p)
        if unit is not None:
            found[id(unit)] = unit
    return list(found.values())


def refuse_others(optimizer: Any, runtime: Runtime, what: str = "") -> None:
    """Refuse other engines' parameters in an optimizer that steps during this one's backward.

    Raises:
        ConfigError: it holds some.
    """
    for p in params_of(optimizer):
        other = runtime_of(p)
        if other is not None and other is not runtime:
            raise ConfigError(
                f"rank {runtime.collectives.world_rank}: {what}{type(optimizer).__name__} holds parameters of two sharded "
                f"models, {p._spec.name} among them, and a step during the backward of one would be half of a step. Make "
                "an optimizer for each of them, or leave engine.step_in_backward() out. Nothing was changed."
            )


def check_units(optimizer: Any, units: Iterable[Unit]) -> None:
    """Refuse a step inside ``engine.gathered``.

    Raises:
        UnitStateError: a unit is gathered there, so that what leaves it would overwrite the step.
    """
    for unit in units:
        if unit.is_summoned:
            raise UnitStateError(
                f"rank {unit.collectives.world_rank}: {type(optimizer).__name__}.step() inside engine.gathered() of unit "
                f"{unit.name!r}, where parameters are whole and slices out of date; step outside. Nothing was changed."
            )


def refuse_twice(optimizer: Any, param: Any) -> None:
    """Refuse a parameter that an optimizer lists more than once, where steps are rounded stochastically.

    Raises:
        ConfigError: it would be stepped as it is stored, in bf16.
    """
    flat, _ = param._unit_ref().find(param)
    if flat.rounding is not None:
        raise ConfigError(
            f"rank {param._spec.rank}: {type(optimizer).__qualname__} lists {param._spec.name} more than once, and such a "
            "parameter is stepped in the dtype that it is stored in, without precision.stochastic_rounding; list it once. "
            "Nothing was changed."
        )


def refuse_without_rounding(optimizer: Any, runtime: Runtime) -> None:
    """Refuse an optimizer that would step on the ShardTensors themselves, where steps are rounded stochastically.

    Raises:
        ConfigError: what it adds would be rounded to nearest.
    """
    for p in params_of(optimizer):
        unit = unit_of(p)
        if unit is None or unit.runtime is not runtime or unit.find(p)[0].rounding is None:
            continue
        name = type(optimizer).__qualname__
        raise ConfigError(
            f"rank {p._spec.rank}: precision.stochastic_rounding with {name}, an optimizer that the engine does not know: it "
            f"would step on {p._spec.name} as it is stored, in bfloat16, and round to nearest. Declare how it steps: "
            f"torch_shard.optim.register({name}, kind=...). Nothing was changed."
        )


def refuse_unreduced(optimizer: Any, runtime: Runtime) -> None:
    """Refuse gradients that are not reduced: each rank would step its shard with a gradient of its own.

    Raises:
        ShardError: a gradient waits for its reduction, or for the end of an accumulation.
    """
    if not runtime.holds_gradients():
        return
    refuse_unfinished(runtime, params_of(optimizer), "optimizer.step()")
    for p in params_of(optimizer):
        if not isinstance(p, ShardTensor):
            continue
        with torch._C.DisableTorchFunctionSubclass():
            grad: Any = own_grad(p)
        unit = unit_of(p) if is_unreduced(grad) else None
        if unit is not None and unit.runtime is runtime and grad._local.count_nonzero():
            raise ShardError(
                f"rank {p._spec.world_rank}: optimizer.step() with a gradient of {p._spec.name} that is not reduced, because "
                "every backward since zero_grad() ran under no_sync(). Run the last backward, with its forward, outside."
            )


def refuse_offloaded(optimizer: Any, runtimes: Iterable[Runtime], matrix: bool) -> None:
    """Refuse an optimizer that can't step in host memory. `matrix`: it steps on whole matrices, which are sent between devices.

    Raises:
        ShardError: on all ranks; parameters are in the memory of a host with a GPU, where it can't step.
    """
    for runtime in runtimes:
        if runtime.host is None or not runtime.host.on_cuda:
            continue
        cls = type(optimizer)
        why = ""
        if matrix:
            why = "needs whole matrices, which it can't have there"
        elif cls.__module__.partition(".")[0] == "apex":
            why = "has kernels for GPUs only"
        elif any(group.get("capturable") for group in optimizer.param_groups):
            why = "is to be captured in a CUDA graph (capturable=True)"
        if why:
            raise ShardError(
                f"rank {runtime.collectives.world_rank}: {cls.__module__}.{cls.__qualname__} {why}, and parameters are in host "
                "memory (ShardConfig.offload). Use an optimizer of torch.optim that works element by element (AdamW), without "
                "capturable, or leave offload out. Nothing was changed."
            )


def shard_state(optimizer: Any, runtime: Runtime) -> None:
    """Replace whole plain tensors in the state of this runtime's parameters, from before sharding or from a plain
    checkpoint, by this rank's slices of them. Not collective."""
    state = getattr(optimizer, "state", None)
    if not state:
        return
    scalars: list[tuple[ShardTensor, Any, str]] = []
    known = is_torchs(type(optimizer))
    for p in params_of(optimizer):
        own = state.get(p) if isinstance(p, ShardTensor) else None
        if not isinstance(own, dict):
            continue
        for key, value in own.items():
            # Counters are whole on every rank.
            if (
                not (type(value) is torch.Tensor or is_dtensor(value))
                or key in COUNTERS
                or value.shape != p._spec.shape
            ):
                continue
            unit = unit_of(p)
            if unit is None or unit.runtime is not runtime or unit.is_summoned:
                break
            if value.dim() or known:
                own[key] = _slice(value, p)  # the key stays, so the dict may be gone through
            else:
                scalars.append((p, own, key))
    if scalars:
        # Next to a 0-dim parameter its own moments look like counters. Where others have slices under that name, so has it
        # (torch's own counters are known by name).
        dicts = [own for own in state.values() if isinstance(own, dict)]
        sliced = {k for own in dicts for k, v in own.items() if isinstance(v, ShardTensor) and v._spec.shape}
        for p, own, key in scalars:
            if key in sliced:
                own[key] = _slice(own[key], p)


def _slice(value: torch.Tensor, param: ShardTensor) -> ShardTensor:
    unit = unit_of(param) if is_dtensor(value) else None
    if unit is not None:
        flat, index = unit.find(param)
        return ShardTensor(shard_of_part(flat.part_of(value, index), param._spec).clone(), param._spec)
    return ShardTensor.from_full(value.to(param._local.device), param._spec)
