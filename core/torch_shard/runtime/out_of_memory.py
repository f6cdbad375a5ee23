"""Additions to the error that memory has run out in a step: what holds the memory, and which settings would take less.

The error keeps its class, by which programs that try a smaller batch catch it. The additions follow its own message.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..config.bytes_text import read_bytes
from ..config.offload import offload_of
from ..log import ANY_RANK, logger
from ..plan.memory_estimate import mib
from ..plan.plan import Plan
from ..unit.unit import Unit
from . import registry, statistics

if TYPE_CHECKING:
    from .runtime import Runtime

OPTIMIZER_STEP = "optimizer's step"

# How the RuntimeError of torch's allocator for CPUs begins; and how all allocators name the size of a request.
_ON_CPU = "DefaultCPUAllocator: "
_ASKED = re.compile(r"allocate ([\d.]+ ?[kKMGT]?i?)(?:bytes|B)")


class Moment(NamedTuple):
    """The unit that runs, and the bytes that are held, before the engine drops what a failed backward has left."""

    unit: Unit | None
    gathered: int
    gradients: int
    allocated: int | None

    @classmethod
    def of(cls, runtime: Runtime, unit: Unit | None = None) -> Moment:
        """Return the present moment; by default the unit is that to which the running backward has come last, if any."""
        begun = [use for each in runtime.units for use in each.uses]
        if unit is None and begun:
            unit = min(begun, key=operator.attrgetter("end")).unit  # backward comes to later forwards first
        allocated = runtime.collectives.streams.allocated_memory()
        return cls(unit, runtime.gathered_bytes.now, statistics.gradient_bytes(runtime), allocated)


def explain(runtime: Runtime, error: BaseException | None, phase: str, unit: Unit | None = None) -> None:
    """Add to an error that memory has run out what is known of the reason; leave other errors as they are. Not collective.

    Args:
        runtime: the model's runtime.
        error: the error that is about to leave the engine.
        phase: ``"forward"``, ``"backward"`` or :data:`OPTIMIZER_STEP`.
        unit: the unit that runs, if that is known; in a backward it is that to which this has come last.
    """
    if not isinstance(error, torch.OutOfMemoryError) and not (
        isinstance(error, RuntimeError) and _ON_CPU in str(error)
    ):
        return
    if "torch_shard" in vars(error):
        return  # an inner module or another engine has done so
    try:
        failed = runtime.backwards.failed if phase == "backward" else None
        now = Moment.of(runtime, unit) if failed is None else failed
        where = "" if now.unit is None else f" of {now.unit.name}"
        runtime.collectives.watchdog.tell(f"ran out of memory in the {phase}{where}")
        text = "\n".join([str(error), *_lines(runtime, str(error), phase, now, where)])
    except Exception:  # it must not replace the error itself
        logger.exception("what holds the memory can't be said", extra=ANY_RANK)
        return
    vars(error)["torch_shard"] = phase
    error.args = (text, *error.args[1:])


def _lines(runtime: Runtime, message: str, phase: str, now: Moment, where: str) -> Iterator[str]:
    rank = runtime.collectives.world_rank
    yield f"rank {rank}: memory has run out in the {phase}{where}. This rank holds, and was planned to hold:"
    engine = registry.engine_for_runtime(runtime)
    plan: Plan | None = None if engine is None else engine.plan
    expected = None if plan is None else plan.predicted
    held = {
        "parameters": statistics.parameter_bytes(runtime),
        "gathered units": now.gathered,
        "gradients": now.gradients,
        "optimizer state": statistics.optimizer_bytes(runtime),
    }
    planned = (0, 0, 0, 0)
    if expected is not None:
        planned = (expected.parameters, expected.gathered_peak, expected.gradients, expected.optimizer)
    for (kind, nbytes), planned_bytes in zip(held.items(), planned, strict=True):
        yield f"  {kind}: {mib(nbytes)} MiB ({mib(planned_bytes)})"
    # With offload some of what is held is in host memory.
    allocated = None if runtime.host is not None else now.allocated
    rest = "" if allocated is None else f", {mib(max(0, allocated - sum(held.values())))} MiB,"
    yield f"The rest{rest} is activations, buffers, temporary tensors, and what else the program keeps."
    if phase == OPTIMIZER_STEP:
        yield "Some parameters and their state may have stepped, others not; load a checkpoint before training goes on."
    elif runtime.in_backward is not None and phase == "backward":
        yield "Units whose gradients were complete have stepped in this backward; load a checkpoint before training goes on."
    else:
        dropped = "; gradients of this backward are dropped" * (phase == "backward")
        yield f"Parameters and optimizer state are unchanged{dropped}."
    if engine is not None and engine.smaller_settings:
        yield f"Of the settings that the plan has tried, these take less memory: {'; '.join(engine.smaller_settings)}."
    elif plan is not None:
        yield from _cheaper(plan, _asked(message))


def _asked(message: str) -> int:
    """Return the number of bytes that were requested, by the message of an allocator; 0 if the message doesn't say."""
    found = _ASKED.search(message)
    return 0 if found is None else read_bytes("", found[1].strip() + "B")


def _cheaper(plan: Plan, asked: int) -> Iterator[str]:
    """Yield lines on what would take less memory: first the two settings that cost the least time."""
    now = plan.predicted.device_peak
    found = []
    for strategy, offloaded in _slower(plan) if asked else ():
        changed = dataclasses.replace(plan, strategy=strategy, offload=offload_of("cpu") if offloaded else plan.offload)
        less = now - changed.predicted.device_peak
        if less >= asked:
            found.append(f"{strategy}{' with offload' * offloaded} ({mib(less)} MiB less)")
    if found:
        yield f"These settings would free at least what was asked for: {'; '.join(found[:2])}."
    yield (
        "Activation checkpointing and smaller micro-batches take less for activations. `torch-shard plan` with the script, or "
        'strategy="auto", finds out what fits.'
    )


def _slower(plan: Plan) -> Iterator[tuple[str, bool]]:
    """Yield strategies that send more than the plan's, each with whether it offloads, from fast to slow."""
    order = ("no_shard", "shard_optim", "shard_grad_op", "full_shard")
    usual = {"hybrid_shard": "full_shard", "hybrid_shard_zero2": "shard_grad_op"}.get(plan.strategy, plan.strategy)
    following = order[order.index(usual) :] if plan.world_size > 1 else ("full_shard",)
    if plan.world_size > 1:
        yield from ((strategy, False) for strategy in following if strategy != plan.strategy)
    if plan.offload is None:
        yield from ((strategy, True) for strategy in following)
