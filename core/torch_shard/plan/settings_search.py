"""Finds the settings with which a step fits the memory of a device, and the fastest of these.

Each way to compute activations is traced once: a micro-batch, with or without recomputation, with or without activations in host
memory. The traced step is replayed under every strategy, which takes a fraction of a second. Ways are tried in the order of the
time that they cost, until one fits: recomputation computes a third more, and smaller micro-batches gather parameters more often.

The seconds are those of :mod:`torch_shard.plan.roofline`: they rank candidates and are no prediction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from ..config.checks import check_int
from ..config.offload import Offload
from ..config.shard_config import ShardConfig
from ..errors import BudgetError, ConfigError, TraceError
from .caching_allocator import CachingAllocator
from .device_memory import reserved_by
from .devices import DEVICES, LINKS, Device, Link
from .layer_selection import outermost, repeated_layers
from .memory_estimate import mib
from .plan import Plan
from .planner import make_plan
from .roofline import Timeline
from .sharded_step import sharded_step
from .step_timeline import timeline_of
from .step_trace import CollectiveStart, HostUpdate, Kind, Note, StepTrace
from .trace_for import trace_for

__all__ = ["Candidate", "Estimate", "Hardware", "Replay", "Search", "search", "search_step", "search_with"]

_KEPT: tuple[Kind, ...] = ("activation", "input", "buffer")  # what no strategy changes

OUTSIDE = 1 << 30
"""Bytes of a device that no tensor takes: the CUDA context, and what NCCL's communicators keep. An assumption."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that are tried.

    Attributes:
        strategy, prefetch, shard_size, offload: fields of :class:`torch_shard.ShardConfig`.
        checkpointing: the repeated layers keep only their inputs, and recompute the rest in backward. Names of classes: these do.
        activation_offload: these inputs wait for backward in host memory.
        micro_batch: the samples of one forward on one rank; None where the step says itself.
        accumulation: the number of micro-batches of a step.
    """

    strategy: str
    prefetch: int = 1
    shard_size: int | None = None
    offload: Offload | None = None
    checkpointing: bool | tuple[str, ...] = False
    activation_offload: bool = False
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
        if self.offload is not None:
            parts.append("offload" if self.offload.params else "offload of the optimizer")
        if self.checkpointing:
            layers = f" of {' and '.join(self.checkpointing)}" if isinstance(self.checkpointing, tuple) else ""
            parts.append(f"activation checkpointing{layers}{' and offload' * self.activation_offload}")
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
        host_nbytes: the most bytes of host memory that tensors take, with offload of any kind.
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
        estimates: the candidates that fit, the fastest first; then the others, that which lacks least first. Of those whose
            seconds differ by about a percent, those come first that change less of the program.
        budget: the bytes of the device that a step may take.
        states: the bytes of parameters, gradients and the optimizer's state of one rank under ``full_shard``.
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
        """The fastest candidate that fits; see :attr:`estimates`.

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

    def table(self, most: int | None = None) -> str:
        """Return the candidates as lines of text; at most so many of them."""
        lines = [f"{'MiB':>12}  {'seconds':>8}  settings"]
        for each in self.estimates[:most]:
            lack = "" if each.fits else f"  (lacks {mib(each.lacks)} MiB)"
            if each.host_nbytes:
                lack = f", {mib(each.host_nbytes)} MiB of host memory{lack}"
            lines.append(f"{mib(each.nbytes):>12}  {each.seconds:>8.3f}  {each.candidate}{lack}")
        if most is not None and len(self.estimates) > most:
            lines.append(f"and {len(self.estimates) - most} more, which are slower or lack more")
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

    def trace(
        plan: Plan, config: ShardConfig, micro_batch: int | None, layers: list[nn.Module], offloaded: bool
    ) -> StepTrace:
        args = () if micro_batch is None else (micro_batch,)
        return trace_for(
            model,
            lambda model: sample_step(model, *args),
            plan,
            config,
            device=hardware.on,
            optimizers=held,
            checkpointed=layers,
            offloaded=offloaded,
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


Trace = Callable[[Plan, ShardConfig, int | None, list[nn.Module], bool], StepTrace]
"""Traces one micro-batch: of so many samples, with settings and their plan, where the modules in the list recompute; True: their
inputs wait in host memory."""


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
        layers = [] if recomputes else outermost(repeated_layers("checkpointing", model, config.units))
    except ConfigError:  # there are none
        layers = []
    layers = [layer for layer in layers if not getattr(layer, "gradient_checkpointing", False)]  # transformers' own
    return _Searching(trace, model, config, hardware, batch, layers, recomputes).search()


@dataclasses.dataclass(frozen=True)
class _Way:
    """A way to compute activations; the attributes are those of :class:`Candidate`."""

    micro_batch: int | None
    checkpointing: bool | tuple[str, ...]
    activation_offload: bool


@dataclasses.dataclass
class _Searching:
    trace: Trace
    model: nn.Module
    base: ShardConfig
    hardware: Hardware
    batch: int | None
    layers: list[nn.Module]  # those that can be made to recompute
    recomputes: bool
    estimates: list[Estimate] = dataclasses.field(default_factory=list)
    notes: dict[Note, None] = dataclasses.field(default_factory=dict)
    best: tuple[Plan, StepTrace] | None = None
    states: int = 0

    def __post_init__(self) -> None:
        self.config = dataclasses.replace(self.base, strategy="full_shard", shard_size=None)
        self.plan = make_plan(self.model, self.config, self.hardware.ranks)

    def search(self) -> Search:
        fitting: list[Candidate] = []
        for ways in self._levels():
            for way in ways:
                self._try(way, saves=not fitting)
            fitting = [each.candidate for each in self.estimates if each.fits]
            # Where it takes offload, recomputation of all layers may cost less.
            recomputed = not self.layers or any(way.checkpointing is True for way in ways)
            if any(candidate.offload is None or recomputed for candidate in fitting):
                break
        self.estimates.sort(key=_rank)
        assert self.best is not None  # there is always a strategy to try
        clock: list[float] = []
        replay = Replay(*self.best, self._timeline(self.best[1], clock), clock)
        return Search(tuple(self.estimates), self.hardware.budget, self.states, tuple(self.notes), replay)

    def _levels(self) -> Iterator[list[_Way]]:
        """Yield ways to compute activations, those that cost least time first.

        A row below has ways for all sizes of micro-batches. Each row takes less memory than the one before, at about the price of
        the next smaller micro-batch, and so is one step behind it.
        """
        sizes: list[int | None] = [None]
        if self.batch is not None:
            sizes = [n for n in range(self.batch, 0, -1) if self.batch % n == 0]
        rows: list[list[tuple[bool | tuple[str, ...], bool]]] = [[(self.recomputes, False)]]
        if self.layers:
            kinds = dict.fromkeys(type(layer).__name__ for layer in self.layers)
            rows += [[((kind,), False) for kind in kinds]] * (len(kinds) > 1)
            rows += [[(True, False)]]
            rows += [[(True, True)]] * (self.hardware.on != "cpu")
        for level in range(len(sizes) + len(rows) - 1):
            yield [
                _Way(sizes[level - behind], *how)
                for behind, row in enumerate(rows)
                if 0 <= level - behind < len(sizes)
                for how in row
            ]

    def _try(self, way: _Way, saves: bool) -> None:
        """Estimate the strategies for one way to compute activations; where none fits and `saves`, those that take less, too."""
        names = way.checkpointing
        layers = [layer for layer in self.layers if names is True or (names and type(layer).__name__ in names)]
        # The trace depends on nothing in which the strategies differ.
        try:
            trace = self.trace(self.plan, self.config, way.micro_batch, layers, way.activation_offload)
        except TraceError as error:
            states = f"Parameters, gradients and Adam's state alone are {mib(self.plan.predicted.total)} MiB"
            error.args = (f"{error} {states} on each rank under full_shard.",)
            raise
        self.notes.update(dict.fromkeys(trace.notes))
        usual, savers = (list(self._possible(way, settings)) for settings in (self._strategies(), self._savers()))
        groups = [usual, savers] if saves else [usual]
        if trace.peak(kinds=_KEPT).total > self.hardware.budget:
            groups = [(savers or usual)[-1:]]  # for what it lacks
        for group in groups:
            fits = [self._estimate(candidate, config, trace) for candidate, config in group]
            if any(fits):
                break

    def _possible(self, way: _Way, settings: Iterable[Candidate]) -> Iterator[tuple[Candidate, ShardConfig]]:
        """Yield candidates and their settings; leave out what doesn't go with the settings that all share."""
        accumulation = 1 if way.micro_batch is None or self.batch is None else self.batch // way.micro_batch
        for each in settings:
            candidate = dataclasses.replace(each, **vars(way), accumulation=accumulation)
            with contextlib.suppress(ConfigError):
                yield candidate, candidate.config(self.base)

    def _estimate(self, candidate: Candidate, config: ShardConfig, trace: StepTrace) -> bool:
        """Add the estimate of a candidate; return True if it fits."""
        ranks = self.hardware.ranks
        plan = make_plan(self.model, config, candidate.shard_size or ranks)
        step = sharded_step(trace, plan, config, data_parallel=ranks, accumulates=candidate.accumulation > 1)
        peak = step.peak()
        if not self.states:  # that of the optimizer is the same under all strategies but those with several replicas
            of_optimizer = sum(step.peak(device, ["optimizer state"]).total for device in {"cpu", step.device})
            self.states = self.plan.predicted.total - self.plan.predicted.optimizer + of_optimizer
        nbytes = peak.total if self.hardware.on == "cpu" else reserved_by(step, CachingAllocator()).peak_reserved
        on_host = candidate.offload is not None or candidate.activation_offload
        host_nbytes = step.peak("cpu").total if on_host else 0
        seconds = self._seconds(step, candidate)
        lacks = max(0, nbytes - self.hardware.budget)
        estimate = Estimate(candidate, nbytes, host_nbytes, seconds, lacks, peak.kinds)
        self.estimates.append(estimate)
        if min(self.estimates, key=_rank) is estimate:
            self.best = plan, step
        return estimate.fits

    def _strategies(self) -> Iterator[Candidate]:
        """Yield what differs by strategy, prefetch, and the size of shard groups."""
        ranks, per_node = self.hardware.ranks, self.hardware.ranks_per_node
        if ranks > 1:
            yield Candidate("full_shard")
            yield Candidate("full_shard", prefetch=2)
            yield Candidate("shard_grad_op")
            yield Candidate("shard_optim")
        if 1 < per_node < ranks and ranks % per_node == 0:
            yield Candidate("hybrid_shard", shard_size=per_node)
            yield Candidate("hybrid_shard_zero2", shard_size=per_node)
        yield Candidate("no_shard")

    def _savers(self) -> Iterator[Candidate]:
        """Yield what takes less memory than :meth:`_strategies`, and more time; last what takes least."""
        several = self.hardware.ranks > 1
        if several:
            yield Candidate("full_shard", prefetch=0)
        for offload in (Offload(params=False), Offload()) if self.hardware.on != "cpu" else ():
            # With these a single rank, too, has few units on the device at a time.
            yield Candidate("full_shard", offload=offload)
            yield Candidate("full_shard", prefetch=2, offload=offload)
            yield Candidate("shard_grad_op" if several else "no_shard", offload=offload)
        if self.hardware.on != "cpu":
            yield Candidate("full_shard", prefetch=0, offload=Offload())

    def _seconds(self, step: StepTrace, candidate: Candidate) -> float:
        whole = self._timeline(step).total
        if candidate.accumulation == 1:
            return whole
        return whole + (candidate.accumulation - 1) * self._timeline(_not_last(step, candidate.offload)).total

    def _timeline(self, step: StepTrace, clock: list[float] | None = None) -> Timeline:
        on = self.hardware
        return timeline_of(step, on.device, on.ranks_per_node, on.intra, on.inter, clock=clock)


def _not_last(step: StepTrace, offload: Offload | None) -> StepTrace:
    """Return a micro-batch before the last one: no optimizer steps in it, nor has one before it."""
    copies = set()  # to the device, of what the host has stepped on
    if offload is not None and not offload.params:
        of_units = (e for e in step.events if isinstance(e, CollectiveStart) and e.unit)
        copies = {event.number for event in of_units if event.kind == "to_device"}
    left = (e for e in step.events if getattr(e, "phase", "") != "optimizer" and not isinstance(e, HostUpdate))
    return StepTrace(step.device, tuple(e for e in left if getattr(e, "number", None) not in copies))


def _rank(estimate: Estimate) -> tuple[Any, ...]:
    """Return what candidates are sorted by: those that fit first, and then by time.

    The roofline can't tell times apart that differ by about a percent. Between those, settings that change less of the program
    count, and then memory.
    """
    candidate = estimate.candidate
    changes = candidate.offload is not None, bool(candidate.checkpointing), candidate.activation_offload
    percents = round(100 * math.log(max(estimate.seconds, 1e-9)))
    return estimate.lacks, percents, changes, estimate.nbytes
