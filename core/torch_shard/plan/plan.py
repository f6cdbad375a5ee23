"""What is decided before any data moves: which parameters travel together.

A :class:`Plan` is pure description: names, shapes, dtypes and the modules that trigger each unit.
It holds no tensor and no module, so it can be made on the meta device, printed, compared between
ranks and thrown away. :func:`torch_shard.plan.planner.make_plan` makes one from a model.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..config.offload import Offload
from ..config.param_dtypes import Dtypes
from .memory_estimate import PredictedBytes, mib, predicted_bytes, shard_numel

__all__ = ["BufferInfo", "ParamInfo", "Plan", "PredictedBytes", "UnitPlan", "flat_order"]


@dataclass(frozen=True)
class ParamInfo:
    """One parameter object, however many names it has.

    Attributes:
        name: Full name of its first registration, as ``named_parameters()`` gives it.
        owners: Every ``(module name, attribute)`` that holds the object, the first registration
            first. A module registered under two names counts once, under its first name.
        aliases: The other full names under which a ``state_dict()`` lists it; the first thousand of each place.
        dtypes: How it is kept between steps, gathered and reduced.
        shape: Global shape.
        stride: Global strides, in elements.
        dtype: Its dtype at planning time.
        requires_grad: Its flag at planning time. It may change during training.
        placed: how tensor parallelism has distributed it, in words; empty for a plain tensor.
        ways: into how many parts that cuts it. Bytes are those of one part.
    """

    name: str
    owners: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    aliases: tuple[str, ...] = ()
    dtypes: Dtypes = field(default=None)  # type: ignore[assignment]
    placed: str = ""
    ways: int = 1

    def __post_init__(self) -> None:
        if self.dtypes is None:
            object.__setattr__(self, "dtypes", Dtypes(self.dtype, self.dtype, self.dtype, self.dtype))

    @property
    def numel(self) -> int:
        """Number of elements; a 0-d parameter has one."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Elements that modules on one rank compute with: of the largest part, where it is cut."""
        return -(-self.numel // self.ways)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter as it is stored between steps."""
        return self.local_numel * self.dtypes.stored.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole parameter while it is gathered."""
        return self.local_numel * self.dtypes.compute.itemsize

    @property
    def reduced_nbytes(self) -> int:
        """Bytes of its whole gradient when it is reduced."""
        return self.local_numel * self.dtypes.reduce.itemsize

    @property
    def residual_nbytes(self) -> int:
        """Bytes that error feedback keeps on each rank, where gradients are quantized."""
        quantized = self.dtypes.quantized
        dtype = quantized.residual_dtype(self.dtypes) if quantized is not None and self.requires_grad else None
        return 0 if dtype is None else self.numel * dtype.itemsize


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and released together.

    Attributes:
        name: Unique within the plan: the module's name for a block, ``first..last`` for a run of
            modules, ``(root)`` for the root's own parameters, ``group 0`` for a group by name.
        params: In the order of the flat buffer (see :func:`flat_order`).
        triggers: Names of the modules whose forward needs this unit, ``""`` being the root.
    """

    name: str
    params: tuple[ParamInfo, ...]
    triggers: tuple[str, ...]

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return sum(p.numel for p in self.params)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, without padding."""
        return sum(p.nbytes for p in self.params)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of all parameters while they are gathered, without padding."""
        return sum(p.gathered_nbytes for p in self.params)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the unit is stored in, in order of first appearance."""
        return tuple(dict.fromkeys(p.dtypes.stored for p in self.params))

    @property
    def kinds(self) -> tuple[Dtypes, ...]:
        """How its parameters are kept, gathered and reduced, in order of first appearance: one flat buffer each (two where some
        are frozen)."""
        return tuple(dict.fromkeys(p.dtypes for p in self.params))

    @property
    def flat_buffers(self) -> tuple[tuple[ParamInfo, ...], ...]:
        """Its parameters, by the flat buffers in which they lie."""
        found: dict[tuple[bool, bool, torch.dtype, Dtypes], list[ParamInfo]] = {}
        for p in self.params:
            found.setdefault((p.ways > 1, p.requires_grad, p.dtype, p.dtypes), []).append(p)
        return tuple(map(tuple, found.values()))

    def shard_bytes(self, world_size: int) -> int:
        """Return the bytes of one rank's shards of the parameters, padding included."""
        return sum(shard_numel(p, world_size) * p[0].dtypes.stored.itemsize for p in self.flat_buffers)


@dataclass(frozen=True)
class BufferInfo:
    """A buffer of the model; buffers are replicated, never sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """Every parameter of a model, each in exactly one unit or ignored.

    Attributes:
        units: In registration order of each unit's first parameter.
        world_size: Ranks that share the parameters.
        ignored: Full names of parameters left alone, in registration order.
        buffers: All buffers of the model, in registration order, each object once.
        strategy: As in ``ShardConfig``; decides the predicted bytes only.
        prefetch: As in ``ShardConfig``; decides the predicted bytes only.
        offload: As in ``ShardConfig``; decides the predicted bytes only.
    """

    units: tuple[UnitPlan, ...]
    world_size: int
    ignored: tuple[str, ...] = ()
    buffers: tuple[BufferInfo, ...] = ()
    strategy: str = "full_shard"
    prefetch: int = 1
    offload: Offload | None = None

    @property
    def params(self) -> tuple[ParamInfo, ...]:
        """All planned parameters, unit by unit."""
        return tuple(p for unit in self.units for p in unit.params)

    @property
    def numel(self) -> int:
        """Elements of all planned parameters."""
        return sum(unit.numel for unit in self.units)

    def unit_of(self, param_name: str) -> UnitPlan:
        """The unit that holds a parameter, by any of its names; KeyError if none does."""
        for unit in self.units:
            if any(param_name == p.name or param_name in p.aliases for p in unit.params):
                return unit
        raise KeyError(param_name)

    @property
    def predicted(self) -> PredictedBytes:
        """The bytes per rank under this plan, and without sharding; see :class:`PredictedBytes`."""
        return predicted_bytes(self)

    @property
    def shard_ranks(self) -> int:
        """The number of ranks among which each parameter is cut."""
        return self.world_size if self.strategy != "no_shard" else 1

    def digest(self) -> int:
        """A stable 63-bit hash of :meth:`lines`: equal on ranks whose plans are equal."""
        joined = "\n".join(self.lines()).encode()
        value = int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big")
        return value & ((1 << 63) - 1)

    def lines(self) -> list[str]:
        """One readable line per parameter and buffer, to find where two ranks' models differ."""
        lines = [f"world size {self.world_size}, strategy {self.strategy}"]
        for index, unit in enumerate(self.units):
            where = f"unit {index} {unit.name!r} triggered by {list(unit.triggers)}"
            lines += [
                f"parameter {p.name!r}: shape {p.shape}, stride {p.stride}, {p.dtype} kept as {p.dtypes}, "
                f"{f'distributed {p.placed}, ' * bool(p.placed)}requires_grad {p.requires_grad}, held by {list(p.owners)}, "
                f"{where}"
                for p in unit.params
            ]
        lines += [f"ignored parameter {name!r}" for name in self.ignored]
        lines += [f"buffer {b.name!r}: shape {b.shape}, {b.dtype}" for b in self.buffers]
        return lines

    def table(self, max_rows: int = 40) -> str:
        """The plan as aligned plain text, with totals and predicted bytes per rank.

        Args:
            max_rows: With more units than this, equal consecutive ones share a row, which then
                shows the numbers of one of them and how many there are.
        """
        head = ("unit", "params", "elements", "dtype", "MiB full", "MiB/rank", "triggers")
        groups: list[tuple[UnitPlan, ...]] = (
            [(unit,) for unit in self.units] if len(self.units) <= max_rows else _equal_runs(self.units)
        )
        rows = [self._row(group) for group in groups]
        rows.append(
            (
                f"total ({len(self.units)} units)",
                f"{len(self.params):,}",
                f"{self.numel:,}",
                "",
                mib(sum(u.nbytes for u in self.units)),
                mib(sum(u.shard_bytes(self.shard_ranks) for u in self.units)),
                "",
            )
        )
        return "\n".join(_aligned(head, rows, right=(1, 2, 4, 5)) + self._summary())

    def _row(self, group: Sequence[UnitPlan]) -> tuple[str, ...]:
        unit, last = group[0], group[-1]
        name = unit.name if len(group) == 1 else f"{unit.name} to {last.name} ({len(group)} units)"
        triggers = [t or "(root)" for t in unit.triggers]
        shown = ", ".join(triggers[:3]) + (f", +{len(triggers) - 3}" if len(triggers) > 3 else "")
        return (
            name,
            f"{len(unit.params):,}",
            f"{unit.numel:,}",
            ", ".join(map(str, unit.kinds)),
            mib(unit.nbytes),
            mib(unit.shard_bytes(self.shard_ranks)),
            "each itself" if len(group) > 1 else shown,
        )

    def _summary(self) -> list[str]:
        lines = ["", *self.predicted.lines(self.strategy, self.world_size)]
        if self.ignored:
            lines.append(f"  ignored: {len(self.ignored)} parameters, left as they are")
        return lines


def flat_order(params: Iterable[ParamInfo]) -> tuple[ParamInfo, ...]:
    """Order of a unit's parameters in its flat buffers; ``params`` come as registered.

    Trainable before frozen, so that the gradient buffer covers a prefix; then by dtype; then
    matrices before vectors, so that an optimizer with the usual two weight-decay groups steps on
    two long runs. Within these as registered.
    """
    return tuple(sorted(params, key=lambda p: (not p.requires_grad, str(p.dtypes), len(p.shape) < 2)))


def _equal_runs(units: Sequence[UnitPlan]) -> list[tuple[UnitPlan, ...]]:
    """Consecutive units that differ only in the numbers of their names, together."""

    def likeness(unit: UnitPlan) -> tuple[object, ...]:
        # Only blocks that trigger themselves: the shared row says so.
        itself = unit.triggers == (unit.name,) or unit.name
        name = re.sub(r"\d+", "#", unit.name)
        return name, itself, len(unit.params), unit.numel, unit.kinds

    groups: list[list[UnitPlan]] = []
    for unit in units:
        if groups and likeness(groups[-1][0]) == likeness(unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [tuple(group) for group in groups]


def _aligned(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: tuple[int, ...]) -> list[str]:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [line(head), rule, *(line(row) for row in rows[:-1]), rule, line(rows[-1])]
