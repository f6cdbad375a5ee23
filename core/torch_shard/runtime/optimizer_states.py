"""The sharded state of the optimizers that hold a model's parameters, which a rank alone may read from the others.

State is found by its parameter and key, in the optimizers that have stepped on the model or have been loaded. It changes with the
parameters, within one version, so that a reader is admitted to both by one lock.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..comm.one_sided.partners import ShardPart
from ..errors import DivergenceError
from ..shard_tensor.tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """The optimizers of one model on this rank. Their state is kept until the ranks meet, should this rank drop them."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._states: list[tuple[weakref.ref[Any], Any]] = []  # the optimizers, each with its state

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand out the state of an optimizer that holds parameters of the model, from now on."""
        if not any(ref() is optimizer and state is optimizer.state for ref, state in self._states):
            others = [(ref, state) for ref, state in self._states if ref() not in (None, optimizer)]
            self._states = [*others, (weakref.ref(optimizer), optimizer.state)]

    def met(self) -> None:
        """Note that all ranks have come to a collective: they have dropped what this rank has dropped before it."""
        if any(ref() is None for ref, _ in self._states):
            self._states = [(ref, state) for ref, state in self._states if ref() is not None]

    @property
    def are_read_alone(self) -> bool:
        """True if one rank alone may read state: it is on the devices, where no step goes on in the background."""
        return self._runtime.host is None

    def shard_to_send(self, part: ShardPart) -> torch.Tensor:
        """Return this rank's shard of the state that a reader wants: contiguous, on the CPU. Called in any thread.

        Raises:
            DivergenceError: no optimizer of this rank has it, or several have.
        """
        param = self._flat(part).params[part.param]
        found = [value for _, state in self._states if (value := _entry(state, param, part.key)) is not None]
        if len(found) != 1:
            raise DivergenceError(
                f"{len(found) or 'no'} optimizers of it that have stepped on the model or were loaded have {part.key!r} of "
                f"{param._spec.name}. Save on every rank."
            )
        shard = found[0]._local.detach()
        if shard.is_cuda and (changed := self._runtime.versions.event) is not None:
            torch.cuda.current_stream(shard.device).wait_event(changed)  # the thread has a stream of its own
        return shard.cpu().contiguous()

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
        flat = self._flat(part)
        param = flat.params[part.param]
        if (
            flat.split
            or not self.are_read_alone
            or not any(_entry(state, param, part.key) is own for _, state in self._states)
        ):
            return None
        if self._runtime.collectives.world == 1:
            state: torch.Tensor = flat.read_state(part, own._local, None)
            return state
        with self._runtime.lone.alone(f"the {part.key} of {param._spec.name}") as reading:
            return None if reading is None else flat.read_state(part, own._local, reading)

    def _flat(self, part: ShardPart) -> Any:
        return self._runtime.schedule.units[part.unit].flats[part.flat]


def _entry(state: Any, param: ShardTensor, key: str) -> ShardTensor | None:
    """Return what an optimizer's state has of `param` under `key`; None if that is no sharded tensor."""
    entries = state.get(param)
    value = entries.get(key) if isinstance(entries, dict) else None
    return value if isinstance(value, ShardTensor) else None
