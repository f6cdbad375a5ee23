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
from ..errors import ConfigError, TraceError
from .device_memory import reserved_by
from .devices import Device, Link
from .hardware import Hardware
from .layer_selection import outermost, repeated_layers
from .memory_estimate import mib
from .plan import Plan
from .planner import make_plan
from .search_results import Candidate, Estimate, Replay, Search
from .sharded_step import sharded_step
from .step_timeline import timeline_of
from .step_trace import CollectiveStart, HostUpdate, Kind, Note, StepTrace
from .trace_for import trace_for

_KEPT: tuple[Kind, ...] = ("activation", "input", "buffer")  # what no strategy changes


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
        optimizers: the optimizers that `sample_step` uses and that were made before.
        device: the figures of the device; by default ``DEVICES["h100"]``, or ``"cpu"``.
        on: the type of the device.
        intra, inter: the links within a node and between nodes; by default NVLink 4 and InfiniBand NDR, or Gloo's on one machine.
        margin: the part of the memory that is to stay free, from 0 to less than 1.

    Raises:
        ConfigError: an argument is out of range.
        TraceError: the step can't be traced.
    """
    hardware = Hardware.of(memory, ranks, ranks_per_node, device=device, on=on, intra=intra, inter=inter, margin=margin)
    config = ShardConfig() if config is None else config
    return search_step(model, sample_step, hardware, batch=batch, config=config, optimizers=optimizers)


def search_step(
    model: nn.Module,
    sample_step: Callable[..., object],
    hardware: Hardware,
    *,
    batch: int | None,
    config: ShardConfig,
    optimizers: Iterable[torch.optim.Optimizer],
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

    return search_with(trace, model, config, hardware, batch)


Trace = Callable[[Plan, ShardConfig, int | None, list[nn.Module], bool], StepTrace]
"""A function that traces one micro-batch.

It takes the plan, the settings, the number of samples (None if the step sets it), the modules that recompute, and True if the
inputs of these wait in host memory.
"""


def search_with(
    trace: Trace,
    model: nn.Module,
    config: ShardConfig,
    hardware: Hardware,
    batch: int | None = None,
    recomputes: bool = False,
) -> Search:
    """Find settings as :func:`search` does, by another function that traces. `recomputes`: layers of the model do so already."""
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
    """A search under way."""

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
            # If only offload makes it fit, recomputing all layers may be cheaper.
            recomputed = not self.layers or any(way.checkpointing is True for way in ways)
            if any(candidate.offload is None or recomputed for candidate in fitting):
                break
        self.estimates.sort(key=_sort_key)
        assert self.best is not None  # there is always a strategy to try
        clock: list[float] = []
        replay = Replay(*self.best, timeline_of(self.best[1], self.hardware, clock), clock)
        return Search(tuple(self.estimates), self.hardware.budget, self.states, tuple(self.notes), replay)

    def _levels(self) -> Iterator[list[_Way]]:
        """Yield ways to compute activations, those that cost least time first.

        Each of the rows is tried with all sizes of micro-batches. A row takes less memory than the one before, at about the price
        of the next smaller micro-batch, and so is one size behind it.
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
        """Estimate the strategies for one way to compute activations.

        Where none of them fits, and with `saves`, strategies that take less memory are estimated as well.
        """
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
            groups = [(savers or usual)[-1:]]  # nothing can fit; this one says how much is missing
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
        if not self.states:  # The optimizer's state is equally large under all strategies without replicas.
            of_optimizer = sum(step.peak(device, ["optimizer state"]).total for device in {"cpu", step.device})
            self.states = self.plan.predicted.total - self.plan.predicted.optimizer + of_optimizer
        nbytes = peak.total if self.hardware.on == "cpu" else reserved_by(step).reserved
        on_host = candidate.offload is not None or candidate.activation_offload
        host_nbytes = step.peak("cpu").total if on_host else 0
        seconds = self._seconds(step, candidate)
        lacks = max(0, nbytes - self.hardware.budget)
        estimate = Estimate(candidate, nbytes, host_nbytes, seconds, lacks, peak.kinds)
        self.estimates.append(estimate)
        if min(self.estimates, key=_sort_key) is estimate:
            self.best = plan, step
        return estimate.fits

    def _strategies(self) -> Iterator[Candidate]:
        """Yield the strategies, with their prefetch and shard sizes."""
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
        """Yield settings that take less memory and more time; the one that takes least comes last."""
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
        whole = timeline_of(step, self.hardware).total
        if candidate.accumulation == 1:
            return whole
        not_last = timeline_of(_not_last(step, candidate.offload), self.hardware).total
        return whole + (candidate.accumulation - 1) * not_last


def _not_last(step: StepTrace, offload: Offload | None) -> StepTrace:
    """Return a micro-batch before the last one: no optimizer steps in it, nor has one before it."""
    copies = set()  # to the device, of what the host has stepped on
    if offload is not None and not offload.params:
        of_units = (e for e in step.events if isinstance(e, CollectiveStart) and e.unit)
        copies = {event.number for event in of_units if event.kind == "to_device"}
    left = (e for e in step.events if getattr(e, "phase", "") != "optimizer" and not isinstance(e, HostUpdate))
    return StepTrace(step.device, tuple(e for e in left if getattr(e, "number", None) not in copies))


def _sort_key(estimate: Estimate) -> tuple[Any, ...]:
    """Return what candidates are sorted by: those that fit first, and then by time.

    The roofline can't tell times apart that differ by about a percent. Between those, settings that change less of the program
    count, and then memory.
    """
    candidate = estimate.candidate
    changes = candidate.offload is not None, bool(candidate.checkpointing), candidate.activation_offload
    percents = round(100 * math.log(max(estimate.seconds, 1e-9)))
    return estimate.lacks, percents, changes, estimate.nbytes
