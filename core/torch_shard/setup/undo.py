"""What a failed ``shard`` does: everything that it has changed becomes what it was.

Parameters are swapped for their shards in place, and each swap is noted with what the parameter was. Values that cost nothing to
keep stay with it: of parameters on the meta device or in files there are none, and what lies elsewhere than the shards will (on
the CPU, of a model that moves to the GPU) is there anyhow until all of it has moved. Of a parameter that lies where its shard
will, the memory is given back at once, since a model may fit only because it shrinks unit by unit. Its values then come back
from the shards: after a failure that all ranks know of, all of them gather. (They are rank 0's then, if those were sent.) User
code and files are done with by that time, so that this is for want of memory only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..errors import SetupError
from ..layout.dtensor_placement import local_of
from ..log import ANY_RANK, logger
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import set_own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat
from .checks import fail_together

__all__ = ["Swapped", "Undo"]


@dataclass(eq=False)
class Swapped:
    """A parameter whose content was swapped with that of another tensor.

    Attributes:
        param: the user's own object.
        before: the tensor that has its content of before the swap.
        hooks, post_hooks: the user's, which stay with the object in a swap and are taken off.
        grad: the user's, whole.
        freed: size, strides and device of the memory that was given back; None where `before` still has its values.
    """

    param: Any
    before: Any
    hooks: Any = None
    post_hooks: Any = None
    grad: torch.Tensor | None = None
    freed: tuple[torch.Size, tuple[int, ...], torch.device] | None = None

    def free(self) -> None:
        """Give the memory of the values back, which the shards have by now."""
        memory = local_of(self.before)
        self.freed = memory.size(), memory.stride(), memory.device
        self.drop()

    def drop(self) -> None:
        """Give the memory of the values back, which nobody wants again."""
        memory = local_of(self.before)
        memory.data = memory.data.new_empty(0)

    def allocate(self) -> None:
        """Take memory for the values again."""
        if self.freed is not None:
            size, stride, device = self.freed
            memory = local_of(self.before)
            memory.data = torch.empty_strided(size, stride, dtype=memory.dtype, device=device)

    def copy(self, values: torch.Tensor) -> None:
        """Take the values back, if they were given up."""
        if self.freed is not None:
            local_of(self.before).data.copy_(values)

    def swap_back(self) -> None:
        """Let the parameter be what it was."""
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(self.param, ShardTensor):
                set_own_grad(self.param, None)
            self.param._backward_hooks = None  # the engine's, which would stay with the object
            torch.utils.swap_tensors(self.param, self.before)
        self.param._backward_hooks = self.hooks
        if self.post_hooks is not None:
            self.param._post_accumulate_grad_hooks = self.post_hooks
        self.param.grad = self.grad


@dataclass(eq=False)
class Undo:
    """What one ``shard`` has changed, in the order of the changes."""

    model: nn.Module
    collectives: Collectives
    together: bool = False  # all ranks know of the failure, so that all are here
    _steps: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for module in self.model.modules():
            self.add(_Slots(module).restore)

    def add(self, step: Callable[[], None]) -> None:
        """Have `step` called after a failure, before those that were added earlier."""
        self._steps.append(step)

    def add_values(self, tensors: Iterable[torch.Tensor]) -> None:
        """Have the present values of plain tensors copied back."""
        kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

        def restore() -> None:
            for tensor, values in kept:
                tensor.data.copy_(values)

        self.add(restore)

    def add_flat(self, flat: FlatBuffer, frees: bool) -> list[Swapped]:
        """Return a list for the parameters of `flat` that are swapped, in their order, which are to be swapped back.

        `frees`: some rank gives their memory back, so that values are gathered, by all ranks that share `flat`.
        """
        swapped: list[Swapped] = []
        self.add(partial(self._restore, flat, swapped, frees))
        return swapped

    def run(self) -> None:
        """Undo everything. Collective where the failure is one of all ranks."""
        self.together |= self.collectives.world == 1
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as error:  # the failure itself is the error to see, and the other steps go on
                logger.error("a failed shard() can't be undone: %s", error, extra=ANY_RANK)
        self.collectives.drop_spares()

    def forget(self) -> None:
        """Let go of what everything was: nothing has failed."""
        self._steps.clear()

    def _restore(self, flat: FlatBuffer, swapped: list[Swapped], frees: bool) -> None:
        c = self.collectives
        if flat.host is not None:
            flat.host.moving.settle()  # until then it has weak references to what waits for it
        if frees and not self.together:
            names = ", ".join(slot.name for slot in flat.layout.slots[: len(swapped)])
            raise SetupError(f"rank {c.world_rank}: {names} stay sharded, since the other ranks have parts of them.")
        if frees:
            error, memory = None, None
            try:
                for each in swapped:
                    each.allocate()
                if flat.sharded:
                    memory = torch.empty(flat.layout.numel * flat.dtype.itemsize, dtype=torch.uint8, device=c.device)
            except Exception as problem:
                error = problem
            fail_together(c, error)
            values = full_flat(flat, "the undoing of a failed shard()", memory)
            for index, each in enumerate(swapped):
                each.copy(flat.view(values, index))
            del values, memory
        for each in swapped:
            each.swap_back()
        swapped.clear()
        unit = flat.unit()
        if unit is not None:  # let go of the shard, before the next values need memory
            unit.flats = [other for other in unit.flats if other is not flat]
            unit.places = [place for place in unit.places if place[2] is not flat]


class _Slots:
    """The parameters and buffers that a module holds, and the list of them that an RNN keeps besides."""

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module
        self.params, self.buffers = dict(module._parameters), dict(module._buffers)
        self.weights: Any = None
        if isinstance(module, nn.RNNBase):
            self.weights = module._flat_weights
            # Whether there are weak references. Not they themselves, which would make a swap impossible.
            self.referred = [ref is not None for ref in getattr(module, "_flat_weight_refs", ())]

    def restore(self) -> None:
        for now, before in ((self.module._parameters, self.params), (self.module._buffers, self.buffers)):
            now.clear()
            now.update(before)
        if self.weights is not None:
            self.module._flat_weights = self.weights
            self.module._flat_weight_refs = [
                weakref.ref(weight) if referred and weight is not None else None
                for weight, referred in zip(self.weights, self.referred, strict=False)
            ]
