"""The methods of ``nn.Module`` that shard the model first, for FullyShardedDataParallel and fully_shard."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from .. import state_dict_type
from ..engine import engine_of
from ..errors import SetupError
from ..shard_tensor.tensor import ShardTensor
from . import deferred_wrap

# True while the state dict of a wrapped module is made in this context.
_running: contextvars.ContextVar[bool] = contextvars.ContextVar("state_dict of a wrapped module", default=False)


class WrappedModule:
    """The methods of wrapped modules that come before those of the module's own class."""

    _wrapped_class: type[nn.Module]  # the module's own class, in classes that class_over makes

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's state dict, of the type that is set for the model.

        Collective if full tensors are asked for, or if the model is not sharded yet: it is sharded first.
        """
        # In the state dict of an outer module only the root may shard: else half of the result would be from before sharding.
        inside = bool(args) or kwargs.get("destination") is not None
        module: Any = self
        root = deferred_wrap.root_of(module)
        is_root = root.__dict__ is module.__dict__
        if deferred_wrap.is_pending(module) and (not inside or is_root):
            deferred_wrap.engine_around(module)
        outermost = not _running.get()
        token = _running.set(True)
        try:
            found = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            _running.reset(token)
        engine = engine_of(root)
        if outermost and not is_root and engine is not None:  # the root's state dict is converted by a hook
            state_dict_type.convert(engine, found, args[1] if len(args) > 1 else kwargs.get("prefix", ""))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of full tensors or ShardTensors.

        Collective if full tensors are loaded into a sharded model.
        """
        module: Any = self
        if deferred_wrap.is_pending(module):
            if any(t.device.type == "meta" for t in (*module.parameters(), *module.buffers())):
                deferred_wrap.engine_around(module, _filled(module, state_dict, strict))
            elif any(isinstance(value, ShardTensor) for value in state_dict.values()):
                deferred_wrap.engine_around(module)
            # Parameters have memory now, to which values are copied.
            if assign and not deferred_wrap.is_pending(module):
                assign = any(
                    isinstance(given := state_dict.get(name), torch.Tensor) and given.dtype != own.dtype
                    for name, own in (*module.named_parameters(), *module.named_buffers())
                )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)  # type: ignore[misc]

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Allocate this rank's shards of parameters on the meta device, filled with zeros. Collective if it shards the model."""
        module: Any = self
        root = deferred_wrap.root_of(module)
        if deferred_wrap.is_pending(module) and any(p.device.type == "meta" for p in root.parameters()):
            deferred_wrap.engine_around(root, {id(t) for t in (*root.parameters(), *root.buffers())})
            return self
        return super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]


def _filled(module: nn.Module, state_dict: Mapping[str, Any], strict: bool) -> set[int]:
    """Return the ids of the parameters and buffers to which a load gives values, if it does not raise.

    If it is strict, these are all that belong in a state dict, whatever the module's hooks make of the names in this one.
    """
    found = set()
    for prefix, part in module.named_modules(remove_duplicate=False):
        for own, left_out in ((part._parameters, ()), (part._buffers, part._non_persistent_buffers_set)):
            for name, tensor in own.items():
                named = f"{prefix}.{name}" if prefix else name
                if tensor is not None and name not in left_out and (strict or named in state_dict):
                    found.add(id(tensor))
    return found


# The class made of a wrapper's and a wrapped module's class: one for each pair, so that equal modules have one type.
_classes: dict[tuple[type, type], type] = {}


def class_over(wrapper: type, wrapped: type[nn.Module], name: str, namespace: dict[str, Any]) -> type:
    """Return the class of wrapped modules, with the bases `wrapper` and `wrapped`. There is one for each pair.

    Raises:
        SetupError: `wrapped` can't be extended.
    """
    if (wrapper, wrapped) not in _classes:
        body = {"_wrapped_class": wrapped, "__module__": wrapper.__module__, **namespace}
        try:
            made = types.new_class(name, (wrapper, wrapped), {}, lambda space: space.update(body))
        except TypeError as error:
            raise SetupError(
                f"{wrapper.__name__}: modules of class {wrapped.__name__} can't be wrapped: {error}"
            ) from error
        _classes[wrapper, wrapped] = made
    return _classes[wrapper, wrapped]
