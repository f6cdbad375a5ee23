"""What a search for settings has found: the candidates, what each of them takes, and a step with the best of them."""

from __future__ import annotations

import dataclasses

from ..config.offload import Offload
from ..config.shard_config import ShardConfig
from ..errors import BudgetError
from .memory_estimate import mib
from .plan import Plan
from .roofline import Timeline
from .step_trace import Kind, Note, StepTrace


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings that are tried.

    Attributes:
        strategy, prefetch, shard_size, offload: fields of :class:`torch_shard.ShardConfig`.
        checkpointing: the repeated layers keep only their inputs, and recompute the rest in backward. If names of classes are
            given, only the layers of these do.
        activation_offload: the inputs of these layers wait for backward in host memory.
        micro_batch: the samples of one forward on one rank; None if the step sets it.
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
    """The memory and the time that a candidate takes on one rank.

    Attributes:
        candidate: the settings.
        nbytes: the most bytes on the device at one time, with the allocator's rounding and fragmentation.
        host_nbytes: the most bytes of host memory that tensors take, with offload of any kind.
        seconds: the seconds of one step, for ranking.
        lacks: the bytes by which it exceeds the budget; 0 for a candidate that fits.
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
        timeline: the times and the streams of the step.
        clock: for each event of the step, the second at which what was computed before it has ended.
    """

    plan: Plan
    step: StepTrace
    timeline: Timeline
    clock: list[float]


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of :func:`torch_shard.plan.search`.

    Attributes:
        estimates: the candidates that fit, the fastest first; then the others, that which lacks the least memory first. Of
            those whose seconds differ by about a percent, those come first that change less of the program.
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
        """A text about what is missing if nothing fits, and what to do."""
        first = self.estimates[0]
        return (
            f"no settings fit {mib(self.budget)} MiB. The closest is {first.candidate}, which lacks {mib(first.lacks)} MiB. "
            f"Parameters, gradients and optimizer state alone are {mib(self.states)} MiB on each rank under full_shard. Use more "
            "ranks, or a smaller or shorter batch."
        )

    def table(self, most: int | None = None) -> str:
        """Return the candidates as lines of text; at most so many of them."""
        lines = [f"{'MiB':>12}  {'seconds':>8}  settings"]
        for each in self.estimates[:most]:
            lack = "" if each.fits else f"  (lacks {mib(each.lacks)} MiB)"
            if each.host_nbytes:
                lack = f", {mib(each.host_nbytes)} MiB of host memory a rank{lack}"
            lines.append(f"{mib(each.nbytes):>12}  {each.seconds:>8.3f}  {each.candidate}{lack}")
        if most is not None and len(self.estimates) > most:
            lines.append(f"and {len(self.estimates) - most} more, which are slower or lack more")
        return "\n".join(lines)
