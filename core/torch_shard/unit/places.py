"""The attributes of modules that hold the parameters of one unit: sharded ones, or the unsharded ones in their place."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ReplacedParameterError
from ..shard_tensor.state import OWN_ATTRIBUTES
from ..utils.autograd_private import inside_functional_call
from .module_params import copy_attributes, rebuild_flat_weights

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer


class Places(list[tuple[nn.Module, str, "FlatBuffer", int]]):
    """Every attribute that holds a parameter of the unit: module, attribute, flat buffer, and the parameter's index there."""

    def refuse_replaced(self, rank: int) -> None:
        """Raise a ReplacedParameterError if a module holds a parameter that is not the sharded one. `rank`: for messages."""
        for module, attribute, flat, index in self:
            held: Any = module._parameters.get(attribute)
            if held is not flat.params[index] and not _is_of_functional_call(held):
                name = flat.layout.slots[index].name
                raise ReplacedParameterError(
                    f"rank {rank}: {type(module).__name__}.{attribute} (sharded as {name!r}) holds a different parameter "
                    "from the one that was sharded. Replace or convert layers before shard(), use load_state_dict without "
                    "assign=True, or close() the engine and shard again."
                )

    def put_unsharded(self) -> None:
        """Put the unsharded parameters into the modules, in place of the sharded ones."""
        for module, attribute, flat, index in self:
            slots, param = module._parameters, flat.params[index]
            held: Any = slots.get(attribute)
            if held is param:  # else torch.func.functional_call has put a tensor there for one call
                slots[attribute] = flat.unsharded_params[index]
            if not param.__dict__.keys() <= OWN_ATTRIBUTES:
                copy_attributes(param, flat.unsharded_params[index])
        self._rebuild_rnns()

    def put_back(self) -> None:
        """Put the sharded parameters back, with the attributes that a forward has set on the unsharded ones."""
        for module, attribute, flat, index in self:
            slots: dict[str, Any] = module._parameters
            unsharded = flat.unsharded_params[index]
            if slots.get(attribute) is unsharded:
                slots[attribute] = flat.params[index]
                if len(unsharded.__dict__) > 1:  # forward has set attributes beside `_place`
                    copy_attributes(unsharded, flat.params[index])
        self._rebuild_rnns()

    def exchange(self, chosen: Mapping[FlatBuffer, list[nn.Parameter]]) -> None:
        """Put the parameters of `chosen` into the modules that hold the present unsharded parameters of a flat buffer."""
        for module, attribute, flat, index in self:
            before, after = flat.unsharded_params[index], chosen[flat][index]
            if module._parameters.get(attribute) is before:
                module._parameters[attribute] = after
                copy_attributes(before, after)
        self._rebuild_rnns()

    def _rebuild_rnns(self) -> None:
        for rnn in self._rnns:
            rebuild_flat_weights(rnn)

    @functools.cached_property
    def _rnns(self) -> list[nn.RNNBase]:
        return list(dict.fromkeys(m for m, *_ in self if isinstance(m, nn.RNNBase)))


def _is_of_functional_call(found: Any) -> bool:
    """Return True if torch.func.functional_call has put `found` into a module, in place of a parameter, for one call."""
    return (isinstance(found, torch.Tensor) and not isinstance(found, nn.Parameter)) or inside_functional_call()
