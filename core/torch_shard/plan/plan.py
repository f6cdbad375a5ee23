"""The plan: which parameters are gathered together, decided before any data moves.

A :class:`Plan` consists of names, shapes, dtypes and the modules that trigger each unit. It holds no tensor and no module, so it
can be made on the meta device, printed, and compared between ranks. :func:`torch_shard.plan.planner.make_plan` makes one from a
model.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..config.offload import Offload
from ..config.param_dtypes import Dtypes
from .memory_estimate import PredictedBytes, layout_of, mib, predicted_bytes


@dataclass(frozen=True)
class ParamInfo:
    """One parameter object, however many names it has.

    Attributes:
        name: the full name of its first registration, as ``named_parameters()`` gives it.
        owners: every ``(module name, attribute)`` that holds the object, the first registration
            first. A module registered under two names counts once, under its first name.
        shape: the global shape.
        stride: the global strides, in elements.
        dtype: its dtype when the plan was made.
        requires_grad: its flag when the plan was made. It may change during training.
        dtypes: the dtypes in which it is stored, computed with and reduced.
        aliases: the other full names under which a ``state_dict()`` lists it; the first thousand of each place.
        placed: its placements by tensor parallelism, as text; empty for a plain tensor.
        ways: the number of parts into which tensor parallelism cuts it. Bytes are those of one part.
    """

    name: str
    owners: tuple[tuple[str, str], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    dtypes: Dtypes
    aliases: tuple[str, ...] = ()
    placed: str = ""
    ways: int = 1

    @property
    def numel(self) -> int:
        """The number of elements; a 0-d parameter has one."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """The number of elements that modules on one rank compute with: those of the largest part if it is cut."""
        return -(-self.numel // self.ways)

    @property
    def nbytes(self) -> int:
        """The bytes of the full parameter in the stored dtype."""
        return self.local_numel * self.dtypes.stored.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """The bytes of the full parameter while it is gathered."""
        return self.local_numel * self.dtypes.compute.itemsize

    @property
    def residual_nbytes(self) -> int:
        """The bytes that error feedback keeps on each rank if gradients are quantized."""
        quantized = self.dtypes.quantized
        dtype = quantized.residual_dtype(self.dtypes) if quantized is not None and self.requires_grad else None
        return 0 if dtype is None else self.numel * dtype.itemsize


@dataclass(frozen=True)
class UnitPlan:
    """Parameters that are gathered and resharded together.

    Attributes:
        name: a name that is unique within the plan: the module's name for a block, ``first..last`` for a run of
            modules, ``(root)`` for the root's own parameters, ``group 0`` for a group by name.
        params: the parameters in the order of the flat buffer (see :func:`flat_order`).
        triggers: the names of the modules whose forward needs this unit; ``""`` is the root.
    """

    name: str
    params: tuple[ParamInfo, ...]
    triggers: tuple[str, ...]

    @property
    def numel(self) -> int:
        """The number of elements, without padding."""
        return sum(p.numel for p in self.params)

    @property
    def nbytes(self) -> int:
        """The bytes of all parameters in their stored dtypes, without padding."""
        return sum(p.nbytes for p in self.params)

    @property
    def gathered_nbytes(self) -> int:
        """The bytes of all parameters while they are gathered, without padding."""
        return sum(p.gathered_nbytes for p in self.params)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the unit is stored in, in order of first appearance."""
        return tuple(dict.fromkeys(p.dtypes.stored for p in self.params))

    @property
    def kinds(self) -> tuple[Dtypes, ...]:
        """The different dtypes of its parameters, in order of first appearance."""
        return tuple(dict.fromkeys(p.dtypes for p in self.params))

    @property
    def flat_buffers(self) -> tuple[tuple[ParamInfo, ...], ...]:
        """The parameters of each flat buffer."""
        found: dict[tuple[bool, bool, torch.dtype, Dtypes], list[ParamInfo]] = {}
        for p in self.params:
            found.setdefault((p.ways > 1, p.requires_grad, p.dtype, p.dtypes), []).append(p)
        return tuple(map(tuple, found.values()))

    def shard_bytes(self, world_size: int) -> int:
        """Return the bytes of one rank's shards of the parameters, padding included."""
        return sum(layout_of(p, world_size).shard_numel * p[0].dtypes.stored.itemsize for p in self.flat_buffers)


@dataclass(frozen=True)
class BufferInfo:
    """A buffer of the model. Buffers are never sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """All parameters of a model, each in exactly one unit or ignored.

    Attributes:
        units: the units in registration order of their first parameters.
        world_size: the number of ranks that share the parameters.
        ignored: the full names of parameters that are not sharded, in registration order.
        buffers: all buffers of the model, in registration order, each object once.
        strategy, prefetch, offload: the settings of ``ShardConfig``; used for the predicted bytes only.
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
        """The parameters of all units."""
        return tuple(p for unit in self.units for p in unit.params)

    @property
    def numel(self) -> int:
        """The number of elements of all units."""
        return sum(unit.numel for unit in self.units)

    def unit_of(self, param_name: str) -> UnitPlan:
        """Return the unit that holds a parameter, by any of its names; raise a KeyError if none does."""
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
        """Return a 63-bit hash of :meth:`lines`, which is equal on ranks whose plans are equal."""
        joined = "\n".join(self.lines()).encode()
        value = int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big")
        return value & ((1 << 63) - 1)

    def lines(self) -> list[str]:
        """Return a line of text for each parameter and buffer, to find where two ranks' models differ."""
        lines = [f"world size {self.world_size}, strategy {self.strategy}"]
        for index, unit in enumerate(self.units):
            where = f"unit {index} {unit.name!r} triggered by {list(unit.triggers)}"
            lines += [
                f"parameter {p.name!r}: shape {p.shape}, stride {p.stride}, {p.dtype} stored as {p.dtypes}, "
                f"{f'distributed {p.placed}, ' * bool(p.placed)}requires_grad {p.requires_grad}, held by {list(p.owners)}, "
                f"{where}"
                for p in unit.params
            ]
        lines += [f"ignored parameter {name!r}" for name in self.ignored]
        lines += [f"buffer {b.name!r}: shape {b.shape}, {b.dtype}" for b in self.buffers]
        return lines

    def table(self, max_rows: int = 40) -> str:
        """Return the plan as aligned plain text, with totals and predicted bytes per rank.

        Args:
            max_rows: the number of units above which equal consecutive ones share a row. The row shows the numbers of one of
                them, and how many they are.
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
        text = ", ".join(triggers[:3]) + (f", +{len(triggers) - 3}" if len(triggers) > 3 else "")
        return (
            name,
            f"{len(unit.params):,}",
            f"{unit.numel:,}",
            ", ".join(map(str, unit.kinds)),
            mib(unit.nbytes),
            mib(unit.shard_bytes(self.shard_ranks)),
            "each itself" if len(group) > 1 else text,
        )

    def _summary(self) -> list[str]:
        lines = ["", *self.predicted.lines(self.strategy, self.world_size)]
        if self.ignored:
            lines.append(f"  ignored: {len(self.ignored)} parameters, left as they are")
        return lines


def flat_order(params: Iterable[ParamInfo]) -> tuple[ParamInfo, ...]:
    """Return a unit's parameters in the order of its flat buffers; `params` are in registration order.

    Trainable parameters come before frozen ones, so that the gradient buffer covers a prefix. Then they are ordered by dtype, and
    matrices come before vectors, so that an optimizer with the usual two weight-decay groups steps on two long runs. Otherwise
    they stay in registration order.
    """
    return tuple(sorted(params, key=lambda p: (not p.requires_grad, str(p.dtypes), len(p.shape) < 2)))


def _equal_runs(units: Sequence[UnitPlan]) -> list[tuple[UnitPlan, ...]]:
    """Return groups of consecutive units that differ only in the numbers in their names."""

    def likeness(unit: UnitPlan) -> tuple[object, ...]:
        # Only blocks that trigger themselves: the shared row says so.
        itself = unit.triggers == (unit.name,) or unit.name
        name = re.sub(r"\d+", "#", unit.name)
        return name, itself, len(unit.params), unit.numel, unit.kinds

    return [tuple(group) for _, group in itertools.groupby(units, likeness)]


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
