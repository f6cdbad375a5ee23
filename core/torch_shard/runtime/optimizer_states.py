"""Reads of sharded optimizer state by one rank alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..comm.one_sided.partners import ShardPart
from ..shard_tensor.tensor import ShardTensor
from ..unit.shard_reads import read_state

if TYPE_CHECKING:
    from .runtime import Runtime


class OptimizerStates:
    """The state of the optimizers that hold a model's parameters, as this rank reads it from the other ranks."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    @property
    def are_read_alone(self) -> bool:
        """True if one rank alone may read state: it is on the devices, where no step goes on in the background."""
        return self._runtime.host is None

    def part_of(self, param: ShardTensor, key: str) -> ShardPart:
        """Return the name that all ranks give to the state of `param` under `key`."""
        unit: Any = param._unit
        flat, index = unit.find(param)
        return ShardPart(unit.index, unit.flats.index(flat), "state", param=index, key=key)

    def read(self, part: ShardPart, own: ShardTensor) -> torch.Tensor | None:
        """Return full state, which this rank reads whatever the others do: plain, in new memory, on the device. Not collective.

        Args:
            part: the result of :meth:`part_of`.
            own: the state, cut like its parameter.

        Returns:
            The values; None where reads alone are switched off, the state lies in host memory, or no optimizer holds `own` (any
            more).

        Raises:
            DivergenceError: another rank has other state, or has stepped already.
        """
        runtime = self._runtime
        flat = runtime.served.flats[part.unit][part.flat]
        if flat.split or not self.are_read_alone or not runtime.served.has(part, own):
            return None
        if runtime.collectives.world == 1:
            return read_state(flat, part, own._local, None)
        with runtime.lone.alone(f"the {part.key} of {flat.params[part.param]._spec.name}") as reading:
            if reading is None:
                return None
            runtime.collectives.watchdog.channels["control"].groups.comparisons.owe()
            return read_state(flat, part, own._local, reading)
