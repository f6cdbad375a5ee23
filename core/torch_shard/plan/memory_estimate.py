"""Predicts how much memory a plan takes on one rank, before any is taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..config.offload import IN_FLIGHT, PAGED, STAGED
from ..layout.flat_layout import FlatLayout, ParamMeta
from ..schedule.reduction_order import IN_FLIGHT_ON_STREAMS

if TYPE_CHECKING:
    from ..config.param_dtypes import Dtypes
    from .plan import ParamInfo, Plan, UnitPlan


@dataclass(frozen=True)
class PredictedBytes:
    """The bytes that one rank will hold if the optimizer keeps two moments of each parameter in its dtype, as Adam does.

    Activations and the model's buffers are not included. Host memory is allocated in pages, whose rounding is not included.

    Attributes:
        parameters: the rank's shards of the parameters, in the dtypes in which they are stored.
        gradients: the rank's shards of the gradients.
        optimizer: the rank's shards of the optimizer state.
        residual: the residuals that error feedback keeps of quantized gradients, see :class:`torch_shard.Quantized`.
        gathered_peak: the most bytes of units that are gathered at one time while a step runs.
        gradient_peak: full gradients, reductions in flight, and copies on their way to the host, at most, while a step runs.
            (Over Gloo fewer reductions are in flight than on a GPU, for which this is.)
        device: the bytes on the device between steps.
        host: the bytes in host memory between steps, with offload. These include the copies of parameters that cross to the
            device, and buffers in which gradients arrive. Over Gloo these buffers are not needed where parameters are sharded.
        host_peak: the most bytes in host memory, which is while gradients are accumulated over several backwards.
        disk: the bytes of parameters and optimizer state on disk.
        unsharded_total: parameters, gradients and optimizer state without sharding, as DDP has them.
    """

    parameters: int
    gradients: int
    optimizer: int
    residual: int
    gathered_peak: int
    gradient_peak: int
    device: int
    host: int
    host_peak: int
    disk: int
    unsharded_total: int

    @property
    def total(self) -> int:
        """The bytes that the rank holds between steps: on the device, in host memory and on disk."""
        return self.device + self.host + self.disk

    @property
    def device_peak(self) -> int:
        """The bytes on the device while a step runs, at most."""
        return self.device + self.gathered_peak + self.gradient_peak

    @property
    def host_at_setup(self) -> int:
        """The bytes of host memory that set-up takes; the first step takes the rest, for optimizer state."""
        return self.host - self.optimizer if self.host and not self.disk else self.host

    def lines(self, strategy: str, world_size: int) -> list[str]:
        """Return the prediction in words, for a plan's table."""
        ratio = self.unsharded_total / self.total if self.total else 1.0
        copies = self.total - self.parameters - self.gradients - self.optimizer - self.residual
        lines = [
            f"{strategy} over {world_size} ranks; per rank, Adam assumed:",
            f"  parameters {mib(self.parameters)} + gradients {mib(self.gradients)} + optimizer {mib(self.optimizer)}"
            + (f" + error feedback {mib(self.residual)}" if self.residual else "")
            + (f" + copies between host and device {mib(copies)}" if copies else "")
            + f" = {mib(self.total)} MiB, against {mib(self.unsharded_total)} MiB unsharded ({ratio:.2f}x)",
        ]
        if self.host:
            on_disk = f"{mib(self.disk)} MiB on disk, " if self.disk else ""
            lines.append(
                f"  of these {mib(self.host)} MiB in host memory (at most {mib(self.host_peak)}, where gradients are "
                f"accumulated), {on_disk}{mib(self.device)} MiB on the device"
            )
        lines.append(
            f"  during a step at most about {mib(self.gathered_peak)} MiB of gathered parameters and "
            f"{mib(self.gradient_peak)} MiB of gradients more"
        )
        return lines


def predicted_bytes(plan: Plan) -> PredictedBytes:
    """Return the bytes that one rank holds under `plan`. Not collective; takes no memory."""
    offload, reduces = plan.offload, plan.world_size > 1
    shards = [shard for unit in plan.units for shard in _shards(plan, unit)]
    trained = [s for s in shards if s.trains]
    parameters = sum(s.numel * s.dtypes.stored.itemsize for s in shards)
    gradients = sum(s.numel * s.dtypes.grad.itemsize for s in trained)
    optimizer = 2 * sum(s.numel * s.dtypes.stored.itemsize for s in trained)
    residual = sum(p.residual_nbytes for p in plan.params)
    device, host, host_peak, disk = parameters + gradients + optimizer + residual, 0, 0, 0
    if offload is not None:
        device = residual + (0 if offload.params else sum(s.crossing_nbytes for s in shards))
        copies = sum(s.crossing_nbytes for s in shards if s.crosses_changed or offload.nvme_params)
        arriving = [(s, s.dtypes.crossing(reduces)) for s in trained]
        staged = STAGED * max((s.numel * d.itemsize for s, d in arriving if d != s.dtypes.grad), default=0)
        on_disk = [0]
        if offload.nvme is not None:
            on_disk += [(2 * s.trains + offload.nvme_params) * s.numel * s.dtypes.stored.itemsize for s in shards]
        disk = sum(on_disk)
        host = parameters + gradients + optimizer + copies + staged - disk
        # Accumulation needs a second buffer, for what arrives until it is added.
        host_peak = host + gradients + min(disk, PAGED * max(on_disk))
    return PredictedBytes(
        parameters,
        gradients,
        optimizer,
        residual,
        _gathered_peak(plan),
        max((_gradients_in_step(plan, unit) for unit in plan.units), default=0),
        device,
        host,
        host_peak,
        disk,
        unsharded_total=sum(p.nbytes * (4 if p.requires_grad else 1) for p in plan.params),
    )


class _Shard(NamedTuple):
    """One rank's shard of a flat buffer; `numel` includes the padding."""

    numel: int
    dtypes: Dtypes
    trains: bool
    crossing_nbytes: int  # cross from the host to the device when the unit is gathered
    crosses_changed: bool  # cast or quantized, so that the host keeps a copy


def _shards(plan: Plan, unit: UnitPlan) -> Iterator[_Shard]:
    for params in unit.flat_buffers:
        numel, dtypes, quantizer = layout_of(params, plan.shard_ranks).shard_numel, params[0].dtypes, None
        if dtypes.quantized is not None and plan.shard_ranks > 1:
            quantizer = dtypes.quantized.parameter_quantizer(dtypes, numel)
        crossing = numel * dtypes.compute.itemsize if quantizer is None else quantizer.nbytes
        yield _Shard(numel, dtypes, params[0].requires_grad, crossing, dtypes.casts or quantizer is not None)


def layout_of(params: Sequence[ParamInfo], ranks: int) -> FlatLayout:
    """Return the layout of a flat buffer with these parameters, each as one dimension of the length that it has on a rank."""
    metas = (ParamMeta(p.name, (p.local_numel,), (1,)) for p in params)
    return FlatLayout.build(metas, params[0].dtypes.smallest, ranks)


def _gradients_in_step(plan: Plan, unit: UnitPlan) -> int:
    """Return the bytes of gradients on the device while `unit` runs backward: full ones, and the shards that they become."""
    offloads, reduces, cuts = plan.offload is not None, plan.world_size > 1, plan.shard_ranks > 1
    if not cuts and not offloads:
        return 0  # a full gradient becomes `.grad` itself
    trained = [s for s in _shards(plan, unit) if s.trains]
    arriving = [p.dtypes.reduce if reduces else p.dtypes.crossing(reduced=False) for p in unit.params]
    full = sum(
        p.local_numel * dtype.itemsize for p, dtype in zip(unit.params, arriving, strict=True) if p.requires_grad
    )
    own = sum(s.numel * s.dtypes.reduce.itemsize for s in trained) if cuts else 0
    leaving = IN_FLIGHT * sum(s.numel * s.dtypes.crossing(reduces).itemsize for s in trained) if offloads else 0
    # Beside the unit's own gradients those of the units in flight, and the shard of one more until the oldest is collected.
    reducing = IN_FLIGHT_ON_STREAMS * full + (IN_FLIGHT_ON_STREAMS + 1) * own if reduces else 0
    return full + reducing + leaving


def _gathered_peak(plan: Plan) -> int:
    """Return the most bytes of units gathered at one time, if units run in the plan's order."""
    sharded = plan.shard_ranks > 1 or plan.offload is not None
    sizes = {u.name: sum(p.gathered_nbytes for p in u.params if sharded or p.dtypes.casts) for u in plan.units}
    if plan.strategy not in ("full_shard", "hybrid_shard"):
        return sum(sizes.values())
    # A unit whose trigger encloses another unit's trigger stays gathered while that one runs.
    prefixes: set[str] = set()
    for unit in plan.units:
        for trigger in unit.triggers:
            parts = trigger.split(".") if trigger else []
            prefixes.update(".".join(parts[:i]) for i in range(len(parts)))
    enclosing = [any(t in prefixes for t in u.triggers) for u in plan.units]
    held = sum(sizes[u.name] for u, encloses in zip(plan.units, enclosing, strict=True) if encloses)
    passing = [sizes[u.name] for u, encloses in zip(plan.units, enclosing, strict=True) if not encloses]
    window = plan.prefetch + 1
    return held + max((sum(passing[i : i + window]) for i in range(len(passing))), default=0)


def mib(nbytes: int) -> str:
    """Return a number of bytes in MiB, for tables."""
    return f"{nbytes / 2**20:,.2f}"
