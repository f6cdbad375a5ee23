"""How a failed ``shard`` leaves everything as it was: each change is noted together with what it replaced.

A parameter's content is swapped in place for its shard. Its former content is kept where that costs nothing: parameters on the
meta device or in a file have no values, and values on another device than the shards, or in a wider dtype, stay there anyway
until the whole model is sharded. Where a parameter is on the device of its shard, the memory of its values is freed at once,
because some models fit only if they shrink unit by unit. After a failure that all ranks know of, the ranks gather such values
from the shards. (If rank 0's values were sent, they are rank 0's.) User code has run and files have been read before the first
memory is freed, so that only missing memory can be the reason for such a failure.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layout.dtensor_placement import local_of
from ..log import ANY_RANK, logger
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import set_own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat


@dataclass(eq=False)
class Swapped:
    """A parameter whose content was swapped with that of another tensor.

    Attributes:
        param: the user's object.
        before: the tensor with the former content of `param`.
        hooks, post_hooks: the user's hooks. A swap leaves them with the object, so they were taken off.
        grad: the user's full gradient.
        freed: True if the memory of the values was freed.
    """

    param: Any
    before: Any
    hooks: Any
    post_hooks: Any
    grad: torch.Tensor | None
    freed: bool = False

    @classmethod
    def about_to(cls, param: Any, other: Any) -> Swapped:
        """Return a record of `param`, whose content is about to be swapped with that of `other`."""
        post_hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        return cls(param, other, param._backward_hooks, post_hooks, param.grad)

    def free(self) -> None:
        """Free the memory of the values, which are in the shards."""
        memory = local_of(self.before)
        memory.data = memory.data.new_empty(0)
        self.freed = True

    def refill(self, values: torch.Tensor) -> None:
        """Copy the values back, if their memory was freed."""
        if self.freed:
            memory = local_of(self.before)
            memory.data = values.to(memory.device, memory.dtype, copy=True)

    def swap_back(self) -> None:
        """Give the parameter its former content."""
        with torch._C.DisableTorchFunctionSubclass():
            if isinstance(self.param, ShardTensor):
                set_own_grad(self.param, None)
            self.param._backward_hooks = None  # the engine's, which would stay with the object
            torch.utils.swap_tensors(self.param, self.before)
        self.put_back()

    def put_back(self) -> None:
        """Give the parameter, whose content is not swapped, its former hooks and gradient."""
        self.param._backward_hooks = self.hooks
        if self.post_hooks is not None:
            self.param._post_accumulate_grad_hooks = self.post_hooks
        self.param.grad = self.grad


class Undo(contextlib.ExitStack):
    """The changes of one ``shard``, which are undone in reverse order if its block raises.

    Attributes:
        all_failed: True after a failure that all ranks know of, so that all of them come to the gathers.
    """

    all_failed = False

    def note_modules(self, model: nn.Module) -> None:
        """Note the parameters and buffers that the modules hold, and the lists of parameters that RNNs hold besides."""
        for module in model.modules():
            self.callback(_restore_module, module, dict(module._parameters), dict(module._buffers))
            if isinstance(module, nn.RNNBase):
                # The weak references themselves would make a swap impossible.
                referred = [ref is not None for ref in getattr(module, "_flat_weight_refs", ())]
                self.callback(_restore_rnn, module, module._flat_weights, referred)

    def note_flat(self, flat: FlatBuffer, has_values: bool) -> list[Swapped]:
        """Return a list that collects the parameters of `flat` as they are swapped; they are swapped back in a failure.

        If they had values (`has_values`), some rank may have freed these, and all ranks gather them.
        """
        swapped: list[Swapped] = []
        self.callback(self._restore_flat, flat, swapped, has_values)
        return swapped

    def _restore_flat(self, flat: FlatBuffer, swapped: list[Swapped], has_values: bool) -> None:
        if flat.host is not None:
            flat.host.pending_writes.wait()  # pending writes hold weak references to parameters, which would prevent a swap
        if has_values and self.all_failed:
            # If the gather fails on this rank, no other one may follow: it would pair with this one on the other ranks.
            self.all_failed = False
            values = full_flat(flat, "the undoing of a failed shard()")
            self.all_failed = True
            for index, each in enumerate(swapped):
                each.refill(flat.view(values, index))
            del values
        elif any(each.freed for each in swapped):
            names = ", ".join(slot.name for slot in flat.layout.slots[: len(swapped)])
            text = "rank %d: %s stay sharded, since the other ranks have parts of them."
            logger.error(text, flat.collectives.world_rank, names, extra=ANY_RANK)
            return
        for each in swapped:
            each.swap_back()
        swapped.clear()
        unit = flat.unit()
        if unit is not None:  # free the shard before the next values need memory
            unit.flats[:] = [other for other in unit.flats if other is not flat]
            unit.places[:] = [place for place in unit.places if place[2] is not flat]


def _restore_module(module: nn.Module, params: dict[str, Any], buffers: dict[str, Any]) -> None:
    for now, before in ((module._parameters, params), (module._buffers, buffers)):
        now.clear()
        now.update(before)


def _restore_rnn(module: Any, weights: Any, referred: list[bool]) -> None:
    module._flat_weights = weights
    pairs = zip(weights, referred, strict=False)
    module._flat_weight_refs = [weakref.ref(w) if is_ref and w is not None else None for w, is_ref in pairs]
