"""The sharded state of the optimizers that hold a model's parameters, which a rank alone may read from the others.

State is found by its parameter and key, in the optimizers that have stepped on the model or have been loaded. It changes with the
parameters, within one version, so that a reader is admitted to both by one lock.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import DivergenceError
from ..shard_tensor.tensor import ShardTensor

if TYPE_CHECKING:
    from ..comm.one_sided.partners import ShardPart
    from .runtime import Runtime

__all__ = ["OptimizerStates"]


class OptimizerStates:
    """The optimizers of one model on this rank, which are not kept alive."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._optimizers: MutableMapping[Any, None] = WeakIdKeyDictionary()

    def add(self, optimizer: Any) -> None:
        """Hand out the state of an optimizer that holds parameters of the model, from now on."""
        self._optimizers[optimizer] = None

    @property
    def are_read_alone(self) -> bool:
        """True if one rank alone may read state: it is on the devices, where no step goes on in the background."""
        return self._runtime.host is None

    def shard_to_send(self, part: ShardPart) -> torch.Tensor:
        """Return this rank's shard of the state that a reader wants: contiguous, on the CPU. Called in any thread.

        Raises:
            DivergenceError: no optimizer of this rank has it, or several have.
        """
        flat = self._runtime.schedule.units[part.unit].flats[part.flat]
        param = flat.params[part.param]
        found = [value for one in list(self._optimizers) if (value := _entry(one, param, part.key)) is not None]
        if len(found) != 1:
            raise DivergenceError(
                f"{len(found) or 'no'} optimizers of it that have stepped on the model or were loaded have {part.key!r} of "
                f"{param._spec.name}. Save on every rank."
            )
        shard = found[0]._local.detach()
        if shard.is_cuda and (changed := self._runtime.versions.event) is not None:
            torch.cuda.current_stream(shard.device).wait_event(changed)  # the thread has a stream of its own
        return shard.cpu().contiguous()

    def read(self, param: ShardTensor, key: str, own: ShardTensor) -> torch.Tensor | None:
        """Return full state, which this rank reads whatever the others do: plain, in new memory, on the device. Not collective.

        Args:
            param: a parameter of the model.
            key: the state's key.
            own: the state, cut like `param`.

        Returns:
            The values; None where reads alone are switched off, the state lies in host memory, or no optimizer holds `own` (any
            more).

        Raises:
            DivergenceError: another rank has other state, or has stepped already.
        """
        unit: Any = param._unit
        flat, index = unit.find(param)
        if flat.split or not self.are_read_alone or not any(_entry(one, param, key) is own for one in self._optimizers):
            return None
        if self._runtime.collectives.world == 1:
            state: torch.Tensor = flat.read_state(index, key, own._local, None)
            return state
        with self._runtime.lone.alone(f"the {key} of {param._spec.name}") as reading:
            return None if reading is None else flat.read_state(index, key, own._local, reading)


def _entry(optimizer: Any, param: ShardTensor, key: str) -> ShardTensor | None:
    """Return the sharded state of `param` under `key`; None if the optimizer has none."""
    entries = optimizer.state.get(param)
    value = entries.get(key) if isinstance(entries, dict) else None
    return value if isinstance(value, ShardTensor) else None
