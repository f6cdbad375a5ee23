"""What memory a plan will take, before any is taken."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..comm.gradient_reduction import IN_FLIGHT_ON_STREAMS
from ..config.offload import IN_FLIGHT, PAGED, STAGED
from ..layout.flat_layout import ALIGNMENT

if TYPE_CHECKING:
    from ..config.offload import Offload
    from ..config.param_dtypes import Dtypes
    from ..numerics.block_quantizer import BlockQuantizer
    from .plan import Plan, UnitPlan

__all__ = ["PredictedBytes", "mib", "predicted_bytes", "shard_nbytes"]

_MIB = 1024.0 * 1024.0


@dataclass(frozen=True)
class PredictedBytes:
    """Bytes that one rank will hold, Adam (two moments in the parameter's dtype) assumed.

    The first three are held between steps, and ``residual``: what error feedback keeps of quantized
    gradients. ``gathered_peak`` and ``gradient_buffer`` come on top
    while a step runs: the units gathered at one time, and the largest unit's full gradient.
    The ``unsharded_`` values are what a rank holds under DDP.

    With offload the first three are in host memory, with ``cast_copy``, or on ``disk``. Each of the host's tensors is rounded up
    to pages; that is not in it.

    Attributes:
        cast_copy: of parameters, in the dtype in which modules compute, where they are stored in another one or on disk, or as
            codes, where these are gathered: what crosses to the device. Held between steps.
        device_copy: with ``Offload(params=False)`` the slices that stay on the device. Held between steps.
        arriving: of gradients, a second buffer in host memory, which comes with accumulation: it holds what arrives until it is
            added. Where gradients are narrower on their way, they need it under ``no_sync`` only.
        staging: of gradients, in host memory, where they arrive narrower than ``.grad`` has them. Held between steps. Over Gloo,
            whose sums are not narrower where parameters are sharded, it is not taken.
        reducing: of gradients, on the device, with several ranks: units in flight beside the one whose gradients are made, with
            the slices that they become, as on GPUs. On top, while a step runs.
        leaving: of gradients, on the device, while they are copied to host memory: slices of one unit, in the dtype in which they
            were reduced, unless that of ``.grad`` is narrower.
        disk: what of parameters and optimizer state is in files.
        paged: how much of that is in memory at one time, while the optimizer steps.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered_peak: int
    gradient_buffer: int
    unsharded_parameters: int
    unsharded_gradients: int
    unsharded_optimizer: int
    residual: int = 0
    offloaded: bool = False
    cast_copy: int = 0
    device_copy: int = 0
    arriving: int = 0
    staging: int = 0
    reducing: int = 0
    leaving: int = 0
    disk: int = 0
    paged: int = 0

    @property
    def total(self) -> int:
        """What one rank holds between steps, on its device, in host memory and on disk."""
        return self.host + self.device + self.disk

    @property
    def _sharded(self) -> int:
        return self.parameters + self.gradients + self.optimizer

    @property
    def unsharded_total(self) -> int:
        """Parameters, gradients and optimizer state without sharding."""
        return self.unsharded_parameters + self.unsharded_gradients + self.unsharded_optimizer

    @property
    def host(self) -> int:
        """In host memory between steps, with offload: parameters, their copy, gradients, what they arrive in, and optimizer
        state, as far as they are not on disk. 0 without."""
        return self._sharded + self.cast_copy + self.staging - self.disk if self.offloaded else 0

    @property
    def host_at_setup(self) -> int:
        """Of this, what is taken when the model is sharded: all but optimizer state, which the first step makes."""
        return self.host - (0 if self.disk else self.optimizer) if self.offloaded else 0

    @property
    def host_peak(self) -> int:
        """In host memory at most, which takes accumulation of gradients over several backwards."""
        return self.host + self.arriving + self.paged

    @property
    def device(self) -> int:
        """On the device, between steps."""
        return self.residual + (self.device_copy if self.offloaded else self._sharded)

    @property
    def device_peak(self) -> int:
        """While a step runs, without activations and buffers of the model."""
        return self.device + self.gathered_peak + self.gradient_buffer + self.reducing + self.leaving

    def lines(self, strategy: str, world_size: int) -> list[str]:
        """In words, for a plan's table."""
        ratio = self.unsharded_total / self.total if self.total else 1.0
        residual = f" + error feedback {mib(self.residual)}" if self.residual else ""
        copies = (
            f" + copy for compute {mib(self.cast_copy + self.device_copy)}" if self.cast_copy + self.device_copy else ""
        )
        lines = [
            f"{strategy} over {world_size} ranks; per rank, Adam assumed:",
            f"  parameters {mib(self.parameters)}{copies} + gradients {mib(self.gradients)} + optimizer "
            f"{mib(self.optimizer)}{residual} = {mib(self.total)} MiB, against {mib(self.unsharded_total)} MiB "
            f"unsharded ({ratio:.2f}x)",
        ]
        if self.offloaded:
            lines.append(
                f"  of these {mib(self.host)} MiB in host memory (at most {mib(self.host_peak)}, where gradients are "
                f"accumulated), {f'{mib(self.disk)} MiB on disk, ' if self.disk else ''}{mib(self.device)} MiB on the device"
            )
        reducing = f", {mib(self.reducing)} MiB of gradients that are being reduced" if self.reducing else ""
        leaving = f" and {mib(self.leaving)} MiB of gradients on their way to the host" if self.leaving else ""
        lines.append(
            f"  during a step at most about {mib(self.gathered_peak)} MiB of gathered parameters "
            f"and {mib(self.gradient_buffer)} MiB of gradient buffer{reducing}{leaving} more"
        )
        return lines


def predicted_bytes(plan: Plan) -> PredictedBytes:
    """Bytes per rank under `plan` and without it. Not collective; takes no memory."""
    world = plan.world_size if plan.strategy != "no_shard" else 1
    offload = plan.offload
    by_unit = [_shards(unit, world) for unit in plan.units]
    shards = [shard for of_unit in by_unit for shard in of_unit]
    trained = [shard for shard in shards if shard.trains]
    gradients = sum(s.numel * s.dtypes.grad.itemsize for s in trained)
    trainable = sum(p.nbytes for p in plan.params if p.requires_grad)
    always = offload is not None and offload.nvme_params
    copied = [s for s in shards if s.dtypes.casts or s.code is not None or always] if offload is not None else []
    kept = [] if offload is None or offload.nvme is None else [_on_disk(s, offload) for s in shards]
    return PredictedBytes(
        parameters=sum(s.numel * s.dtypes.stored.itemsize for s in shards),
        gradients=gradients,
        optimizer=2 * sum(s.numel * s.dtypes.stored.itemsize for s in trained),
        gathered_peak=_gathered_peak(plan, world > 1 or offload is not None),
        gradient_buffer=_gradient_buffer(plan, world),
        unsharded_parameters=sum(unit.nbytes for unit in plan.units),
        unsharded_gradients=trainable,
        unsharded_optimizer=2 * trainable,
        residual=sum(p.residual_nbytes for p in plan.params),
        offloaded=offload is not None,
        cast_copy=sum(map(_crossing, copied)),
        device_copy=0 if offload is None or offload.params else sum(map(_crossing, shards)),
        arriving=0 if offload is None else gradients,
        staging=0 if offload is None else _staging(trained, plan.world_size > 1),
        reducing=_reducing(plan, by_unit),
        leaving=0 if offload is None else _leaving(by_unit, plan.world_size > 1),
        disk=sum(kept),
        paged=min(sum(kept), PAGED * max(kept, default=0)),
    )


def _gradient_buffer(plan: Plan, world: int) -> int:
    """The largest unit's whole gradient. Without other ranks it becomes ``.grad`` itself, unless that is in host memory."""
    if world == 1 and plan.offload is None:
        return 0
    return max(
        (
            sum(
                p.reduced_nbytes if plan.world_size > 1 else p.local_numel * p.dtypes.crossing(reduced=False).itemsize
                for p in unit.params
                if p.requires_grad
            )
            for unit in plan.units
        ),
        default=0,
    )


@dataclass(frozen=True)
class _Shard:
    """One rank's shard of a flat buffer."""

    numel: int  # with padding
    dtypes: Dtypes
    trains: bool
    code: BlockQuantizer | None  # what is gathered in place of values


def _shards(unit: UnitPlan, world: int) -> list[_Shard]:
    found = []
    for params in unit.flat_buffers:
        dtypes = params[0].dtypes
        nbytes = shard_nbytes([p.nbytes for p in params], world, dtypes.alignment)
        numel = nbytes // dtypes.stored.itemsize
        code = None if dtypes.quantized is None or world == 1 else dtypes.quantized.parameter_quantizer(dtypes, numel)
        found.append(_Shard(numel, dtypes, params[0].requires_grad, code))
    return found


def _crossing(shard: _Shard) -> int:
    return shard.numel * shard.dtypes.compute.itemsize if shard.code is None else shard.code.nbytes


def _on_disk(shard: _Shard, offload: Offload) -> int:
    copies = 2 * shard.trains + offload.nvme_params  # two moments
    return copies * shard.numel * shard.dtypes.stored.itemsize


def _leaving(shards: Iterable[list[_Shard]], reduced: bool) -> int:
    return IN_FLIGHT * max(
        (sum(s.numel * s.dtypes.crossing(reduced).itemsize for s in of_unit if s.trains) for of_unit in shards),
        default=0,
    )


def _reducing(plan: Plan, shards: Iterable[list[_Shard]]) -> int:
    """Of the units in flight and, until the oldest has been collected, the slice of one more."""
    cut = (
        plan.strategy != "no_shard"
    )  # else a sum lies where the gradients were, and becomes ``.grad`` unless it goes to the host
    if plan.world_size == 1 or (not cut and plan.offload is None):
        return 0
    held = []
    for unit, of_unit in zip(plan.units, shards, strict=True):
        whole = sum(p.reduced_nbytes for p in unit.params if p.requires_grad)
        own = sum(s.numel * s.dtypes.reduce.itemsize for s in of_unit if s.trains) if cut else 0
        held.append(IN_FLIGHT_ON_STREAMS * whole + (IN_FLIGHT_ON_STREAMS + 1) * own)
    return max(held, default=0)


def _staging(trained: Iterable[_Shard], reduced: bool) -> int:
    arriving = ((s, s.dtypes.crossing(reduced)) for s in trained)
    return STAGED * max((s.numel * dtype.itemsize for s, dtype in arriving if dtype != s.dtypes.grad), default=0)


def shard_nbytes(sizes: Iterable[int], world_size: int, alignment: int = ALIGNMENT) -> int:
    """Bytes of one rank's shard of a flat buffer that holds parameters of these byte sizes.

    The same rule as ``FlatLayout``: every start and the shard itself are multiples of `alignment` bytes.
    """

    def round_up(nbytes: int) -> int:
        return -(-nbytes // alignment) * alignment

    total = 0
    for size in sizes:
        total = round_up(total) + size
    return round_up(-(-total // world_size))


def _gathered_peak(plan: Plan, sharded: bool) -> int:
    """Most bytes of units gathered at one time, when units run in the plan's order."""
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
    """A number of bytes in MiB, for tables."""
    return f"{nbytes / _MIB:,.2f}"
