"""Finds the settings with which a step fits the memory of a device, and the fastest of these.

Each way to compute activations is traced once: a micro-batch, with or without recomputation. The traced step is replayed under
every strategy, which takes a fraction of a second. Ways are tried in the order of the time that they cost, until one fits:
recomputation computes a third more, and smaller micro-batches gather parameters more often.

The seconds are those of :mod:`torch_shard.plan.roofline`: they rank candidates and are no prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import torch
from torch import nn

from ..config.checks import check_int
from ..config.shard_config import ShardConfig
from ..errors import BudgetError, ConfigError
from .caching_allocator import CachingAllocator
from .device_memory import reserved_by
from .devices import DEVICES, LINKS, Device, Link
from .layer_selection import repeated_layers
from .memory_estimate import mib
from .plan import Plan
from .planner import make_plan
from .roofline import Timeline
from .sharded_step import sharded_step
from .step_timeline import timeline_of
from .step_trace import Kind, Note, StepTrace
from .trace_for import trace_for

__all__ = ["Candidate", "Estimate", "Hardware", "Replay", "Search", "search", "search_step", "search_with"]

OUTSIDE = 1 << 30
"""Bytes of a device that no tensor takes: the CUDA context, and what NCCL's communicators keep. An assumption."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that are tried.

    Attributes:
        strategy, prefetch, shard_size, offload: fields of :class:`torch_shard.ShardConfig`.
        checkpointing: the repeated layers keep only their inputs, and recompute the rest in backward.
        micro_batch: the samples of one forward on one rank; None where the step says itself.
        accumulation: the number of micro-batches of a step.
    """

    strategy: str
    prefetch: int = 1
    shard_size: int | None = None
    offload: str | None = None
    checkpointing: bool = False
    micro_batch: int | None = None
    accumulation: int = 1

    def config(self, base: ShardConfig) -> ShardConfig:
        """Return `base` with these settings."""
        return dataclasses.replace(
            base,
            strategy=self.strategy,  # type: ignore[arg-type]
            prefetch=self.prefetch,
            shard_size=self.shard_size,
            offload=self.offload,
        )

    def __str__(self) -> str:
        parts = [self.strategy + (f" of {self.shard_size}" if self.shard_size else "")]
        parts += [f"prefetch {self.prefetch}"] if self.strategy != "no_shard" else []
        parts += ["offload"] * (self.offload is not None) + ["activation checkpointing"] * self.checkpointing
        if self.micro_batch is not None:
            times = f"{self.accumulation} x " if self.accumulation > 1 else ""
            parts.append(f"{times}{self.micro_batch} sample{'s' * (self.micro_batch > 1)}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a candidate takes on one rank.

    Attributes:
        candidate: the settings.
        nbytes: the most bytes on the device at one time, with the allocator's rounding and fragmentation.
        host_nbytes: the most bytes of host memory that tensors take, with offload.
        seconds: of one step, for ranking.
        lacks: how many bytes too few the budget has; 0 for a candidate that fits.
        kinds: the bytes of each kind at the peak, without rounding.
    """

    candidate: Candidate
    nbytes: int
    host_nbytes: int
    seconds: float
    lacks: int
    kinds: dict[Kind, int]

    @property
    def fits(self) -> bool:
        """True if the budget suffices."""
        return self.lacks == 0


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step of one rank with a candidate's settings; of several micro-batches, the last one with the optimizer's step.

    Attributes:
        plan: the units.
        step: what the rank allocates, computes and sends.
        timeline: when, on which stream.
        clock: for each event of the step, the second at which what was computed before it has ended.
    """

    plan: Plan
    step: StepTrace
    timeline: Timeline
    clock: list[float]


@dataclasses.dataclass(frozen=True)
class Search:
    """What :func:`search` has found.

    Attributes:
        estimates: the candidates that fit, the fastest first; then the others, that which lacks least first.
        budget: the bytes of the device that a step may take.
        states: the bytes of parameters, gradients and optimizer state (Adam's) of one rank under ``full_shard``.
        notes: each read of a value that the trace has answered with a constant.
        replay: a step with the settings of the first of the estimates.
    """

    estimates: tuple[Estimate, ...]
    budget: int
    states: int
    notes: tuple[Note, ...]
    replay: Replay

    @property
    def best(self) -> Estimate:
        """The fastest candidate that fits.

        Raises:
            BudgetError: none fits.
        """
        if not self.estimates[0].fits:
            raise BudgetError(self.shortage)
        return self.estimates[0]

    @property
    def shortage(self) -> str:
        """What is missing where nothing fits, in a sentence, and what to do."""
        first = self.estimates[0]
        return (
            f"no settings fit {mib(self.budget)} MiB. {first.candidate} lacks least, {mib(first.lacks)} MiB. Parameters, "
            f"gradients and optimizer state alone are {mib(self.states)} MiB on each rank under full_shard. Use more ranks, "
            "or a smaller or shorter batch."
        )

    def table(self) -> str:
        """Return the candidates as lines of text."""
        lines = [f"{'MiB':>12}  {'seconds':>8}  settings"]
        for each in self.estimates:
            lack = "" if each.fits else f"  (lacks {mib(each.lacks)} MiB)"
            if each.candidate.offload is not None:
                lack = f", {mib(each.host_nbytes)} MiB of host memory{lack}"
            lines.append(f"{mib(each.nbytes):>12}  {each.seconds:>8.3f}  {each.candidate}{lack}")
        return "\n".join(lines)


def search(
    model: nn.Module,
    sample_step: Callable[..., object],
    *,
    memory: int,
    ranks: int,
    ranks_per_node: int | None = None,
    batch: int | None = None,
    config: ShardConfig | None = None,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    device: Device | None = None,
    on: Literal["cpu", "cuda"] = "cuda",
    intra: Link | None = None,
    inter: Link | None = None,
    margin: float = 0.05,
) -> Search:
    """Find settings with which a step fits. Not collective; takes no memory of the model's size, nor a device.

    Args:
        model: the plain model, on ``meta`` or anywhere.
        sample_step: a step, called with `model`: forward, backward, and the optimizer's step. With `batch` it is called with the
            number of samples of a micro-batch as well. See :func:`torch_shard.plan.trace_step.trace_step`.
        memory: the bytes of one device.
        ranks: the number of ranks.
        ranks_per_node: how many of them a node has; by default all.
        batch: the samples of one rank in a step. Where they don't fit at once, smaller micro-batches are accumulated.
        config: settings that all candidates share, such as ``precision`` and ``units``.
        optimizers: those that `sample_step` uses and that were made before.
        device: the figures of the device; by default ``DEVICES["h100"]``, or ``"cpu"``.
        on: the type of the device.
        intra, inter: the links within a node and between nodes; by default NVLink 4 and InfiniBand NDR, or Gloo's on one machine.
        margin: the part of the memory that is to stay free, from 0 to less than 1.

    Raises:
        ConfigError: an argument is out of range.
        TraceError: the step can't be traced.
    """
    hardware = Hardware.of(memory, ranks, ranks_per_node, device=device, on=on, intra=intra, inter=inter, margin=margin)
    return search_step(model, sample_step, hardware, batch=batch, config=config, optimizers=optimizers)


def search_step(
    model: nn.Module,
    sample_step: Callable[..., object],
    hardware: Hardware,
    *,
    batch: int | None = None,
    config: ShardConfig | None = None,
    optimizers: Iterable[torch.optim.Optimizer] = (),
) -> Search:
    """Find settings as :func:`search` does."""
    held = list(optimizers)
    if batch is not None:
        check_int("batch", batch, 1)

    def trace(plan: Plan, config: ShardConfig, micro_batch: int | None, checkpointed: list[nn.Module]) -> StepTrace:
        args = () if micro_batch is None else (micro_batch,)
        return trace_for(
            model,
            lambda model: sample_step(model, *args),
            plan,
            config,
            device=hardware.on,
            optimizers=held,
            checkpointed=checkpointed,
        )

    return search_with(trace, model, ShardConfig() if config is None else config, hardware, batch)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a step is to fit: the ranks, their devices, and the links between them.

    Attributes:
        budget: the bytes of one device that a step may take.
        ranks, ranks_per_node: the number of ranks, and of those of a node.
        device: the figures of the device.
        on: its type.
        intra, inter: the links within a node and between nodes.
    """

    budget: int
    ranks: int
    ranks_per_node: int
    device: Device
    on: Literal["cpu", "cuda"]
    intra: Link
    inter: Link

    @staticmethod
    def of(
        memory: int,
        ranks: int,
        ranks_per_node: int | None = None,
        *,
        device: Device | None = None,
        on: Literal["cpu", "cuda"] = "cuda",
        intra: Link | None = None,
        inter: Link | None = None,
        margin: float = 0.05,
    ) -> Hardware:
        """Return what the arguments of :func:`search` say. Raises ConfigError."""
        for name, value in (("memory", memory), ("ranks", ranks), ("ranks_per_node", ranks_per_node)):
            if value is not None:
                check_int(name, value, 1)
        if not 0 <= margin < 1:
            raise ConfigError(f"margin must be at least 0 and less than 1, not {margin!r}.")
        on_cpu = on == "cpu"
        return Hardware(
            int(memory * (1 - margin)) - (0 if on_cpu else OUTSIDE),
            ranks,
            ranks if ranks_per_node is None else min(ranks_per_node, ranks),
            DEVICES["cpu" if on_cpu else "h100"] if device is None else device,
            on,
            LINKS["gloo-local" if on_cpu else "nvlink4"] if intra is None else intra,
            LINKS["gloo-local" if on_cpu else "ib-ndr400"] if inter is None else inter,
        )


Trace = Callable[[Plan, ShardConfig, int | None, list[nn.Module]], StepTrace]
"""Traces one micro-batch: of so many samples, with settings and their plan, where the modules in the list recompute."""


def search_with(
    trace: Trace,
    model: nn.Module,
    config: ShardConfig,
    hardware: Hardware,
    batch: int | None = None,
    recomputes: bool = False,
) -> Search:
    """Find settings as :func:`search` does, with another way to trace a step. `recomputes`: layers of the model do so already."""
    try:
        layers = [] if recomputes else repeated_layers("checkpointing", model, config.units)
    except ConfigError:  # there are none
        layers = []
    return _Searching(trace, model, config, hardware, batch, layers, recomputes).search()


@dataclasses.dataclass
class _Searching:
    trace: Trace
    model: nn.Module
    base: ShardConfig
    hardware: Hardware
    batch: int | None
    layers: list[nn.Module]  # those that can be made to recompute
    recomputes: bool

    def search(self) -> Search:
        estimates: list[Estimate] = []
        notes: dict[Note, None] = {}
        best: tuple[Plan, StepTrace] | None = None
        for ways in self._levels():
            for micro_batch, checkpointing in ways:
                for estimate, plan, step in self._estimates(micro_batch, checkpointing, notes):
                    estimates.append(estimate)
                    if min(estimates, key=_rank) is estimate:
                        best = plan, step
            if any(estimate.fits for estimate in estimates):
                break
        estimates.sort(key=_rank)
        assert best is not None  # there is always a strategy to try
        clock: list[float] = []
        replay = Replay(*best, self._timeline(best[1], clock), clock)
        sharded = dataclasses.replace(self.base, strategy="full_shard", shard_size=None)
        states = make_plan(self.model, sharded, self.hardware.ranks).predicted
        return Search(tuple(estimates), self.hardware.budget, states.total, tuple(notes), replay)

    def _levels(self) -> Iterator[list[tuple[int | None, bool]]]:
        """Yield ways to compute activations, the fastest first: micro-batches, and whether layers recompute."""
        sizes: list[int | None] = [None]
        if self.batch is not None:
            sizes = [n for n in range(self.batch, 0, -1) if self.batch % n == 0]
        yield [(sizes[0], self.recomputes)]
        for larger, smaller in zip(sizes, sizes[1:], strict=False):
            yield [*([(larger, True)] if self.layers else []), (smaller, self.recomputes)]
        if self.layers:
            yield [(sizes[-1], True)]

    def _estimates(
        self, micro_batch: int | None, checkpointing: bool, notes: dict[Note, None]
    ) -> Iterator[tuple[Estimate, Plan, StepTrace]]:
        """Yield the estimates of all strategies for one way to compute activations, each with the plan and the step."""
        accumulation = 1 if micro_batch is None or self.batch is None else self.batch // micro_batch
        ranks, on_cpu = self.hardware.ranks, self.hardware.on == "cpu"
        trace: StepTrace | None = None
        for strategy, prefetch, shard_size, offload in self._strategies():
            candidate = Candidate(strategy, prefetch, shard_size, offload, checkpointing, micro_batch, accumulation)
            try:
                config = candidate.config(self.base)
            except ConfigError:  # what all share does not go with this strategy
                continue
            plan = make_plan(self.model, config, ranks if shard_size is None else shard_size)
            if trace is None:  # it depends on nothing in which the strategies differ
                trace = self.trace(plan, config, micro_batch, self.layers if checkpointing else [])
                notes.update(dict.fromkeys(trace.notes))
            step = sharded_step(trace, plan, config, data_parallel=ranks, accumulates=accumulation > 1)
            peak = step.peak()
            nbytes = peak.total if on_cpu else reserved_by(step, CachingAllocator()).peak_reserved
            host_nbytes = step.peak("cpu").total if offload is not None else 0
            seconds = self._seconds(step, accumulation)
            lacks = max(0, nbytes - self.hardware.budget)
            yield Estimate(candidate, nbytes, host_nbytes, seconds, lacks, peak.kinds), plan, step

    def _strategies(self) -> Iterator[tuple[str, int, int | None, str | None]]:
        """Yield strategy, prefetch, size of shard groups, and offload."""
        ranks, per_node = self.hardware.ranks, self.hardware.ranks_per_node
        offloads = (None, "cpu") if self.hardware.on != "cpu" else (None,)
        for offload in offloads:
            yield "no_shard", 1, None, offload
            if ranks > 1:
                yield "shard_optim", 1, None, offload
                yield "shard_grad_op", 1, None, offload
            if ranks > 1 or offload is not None:  # one rank alone then has few units on the device at a time
                yield "full_shard", 1, None, offload
                yield "full_shard", 2, None, offload
        if 1 < per_node < ranks and ranks % per_node == 0:
            yield "hybrid_shard", 1, per_node, None
            yield "hybrid_shard_zero2", 1, per_node, None

    def _seconds(self, step: StepTrace, accumulation: int) -> float:
        whole = self._timeline(step).total
        if accumulation == 1:
            return whole
        events = tuple(each for each in step.events if getattr(each, "phase", "") != "optimizer")
        return whole + (accumulation - 1) * self._timeline(StepTrace(step.device, events)).total

    def _timeline(self, step: StepTrace, clock: list[float] | None = None) -> Timeline:
        on = self.hardware
        return timeline_of(step, on.device, on.ranks_per_node, on.intra, on.inter, clock=clock)


def _rank(estimate: Estimate) -> tuple[float, ...]:
    """Return what candidates are sorted by: those that fit first, and then by time."""
    return estimate.lacks, estimate.seconds, estimate.nbytes
