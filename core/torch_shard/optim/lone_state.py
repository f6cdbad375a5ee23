"""Optimizer state for a file that one rank writes alone: ``torch.save(optimizer.state_dict())`` under ``if rank == 0``.

Every rank numbers the optimizers in the order of their first steps, which is the same on all ranks. A rank that writes a state
dict marks the ShardTensors in it with the number of their optimizer, the parameter and the key of the state. By these the other
ranks find their shards.
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ShardError
from ..shard_tensor.tensor import ShardTensor
from ..unit.unit import unit_of

if TYPE_CHECKING:
    from ..comm.one_sided.partners import ShardPart
    from ..runtime.runtime import Runtime
    from ..unit.unit import Unit

__all__ = ["NumberedOptimizers"]


class NumberedOptimizers:
    """The optimizers that have stepped parameters of one engine, by number."""

    def __init__(self) -> None:
        self._numbers: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._count = 0

    def add(self, optimizer: Any) -> None:
        """Give `optimizer`, which steps for the first time, the next number. All ranks must do so in the same order."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = self._count
            self._count += 1

    def mark(self, optimizer: Any, runtime: Runtime | None) -> None:
        """Let the state of the runtime's parameters be written to files by this rank alone. Not collective."""
        number = self._numbers.get(optimizer)
        for param, state in optimizer.state.items() if number is not None else ():
            unit = unit_of(param) if isinstance(param, ShardTensor) else None
            if unit is None or unit.runtime is not runtime or not isinstance(state, dict):
                continue
            for key, value in state.items():
                if isinstance(value, ShardTensor):
                    value._shard_state.reader = _Reader(unit, param, number, key)

    def shard(self, part: ShardPart, param: ShardTensor) -> torch.Tensor:
        """Return this rank's shard of the state of `param` that `part` names: contiguous, on the CPU. Called in any thread.

        Raises:
            ShardError: this rank has no such state.
        """
        assert part.state is not None
        number, _, key = part.state
        optimizer = next((found for found, own in list(self._numbers.items()) if own == number), None)
        value = None if optimizer is None else optimizer.state.get(param, {}).get(key)
        if not isinstance(value, ShardTensor):
            raise ShardError(
                f"rank {param._spec.world_rank} has no sharded optimizer state {key!r} of {param._spec.name}, which another rank "
                "wants to save. Save it on all ranks: engine.optim_state_dict(optimizer)."
            )
        return value._local.detach().cpu().contiguous()


class _Reader:
    """Reads one state of a parameter from all ranks."""

    def __init__(self, unit: Unit, param: ShardTensor, number: int | None, key: str) -> None:
        self._unit, self._param = weakref.ref(unit), weakref.ref(param)
        self._number, self._key = number, key

    def __call__(self, value: ShardTensor) -> torch.Tensor | None:
        unit, param = self._unit(), self._param()
        if unit is None or param is None:
            return None
        found: torch.Tensor | None = unit.runtime.on_demand.full_for_file(
            unit, param, state=(self._number, self._key), dtype=value.dtype
        )
        return found
