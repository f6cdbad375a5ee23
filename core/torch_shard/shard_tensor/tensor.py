"""ShardTensor: a parameter, its gradient or its optimizer state between steps, of which each rank holds a shard.

A ShardTensor has the global shape, strides and dtype. It holds ``_local``, a 1-D range of the parameter in memory order,
usually a view into its unit's flat shard. All that the engine knows of the tensor is in one object, a
:class:`.state.ShardState`. Elementwise arithmetic and reductions to a scalar work on a ShardTensor as on the full tensor
(:mod:`.dispatch`). Within a training step the engine puts the unsharded parameter in its place (:mod:`.torch_function`).
"""

from __future__ import annotations

import copy
import operator
import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShardError, ShardPicklingError
from ..layout.flat_layout import Box
from .host_memory import pending_writes_of
from .spec import ShardSpec, boxes_in, shard_of_full
from .state import OWN_ATTRIBUTES, STATE, ShardState
from .unsharded_param import own_grad, set_own_grad

if TYPE_CHECKING:
    from .ports import UnitPort


class ShardTensor(torch.Tensor):
    """One rank's shard of a tensor, with the shape of the full tensor.

    Making one is not collective.

    Args:
        local: 1-D tensor of ``spec.length`` elements, memory order; kept, not copied.
        spec: the parameter, and this rank's range of it.
        unit: the unit of a parameter, kept by weak reference. None for gradients, optimizer state and results.
        requires_grad: True if the tensor records gradients.
    """

    _shard_state: ShardState
    # These properties run in C; a property that calls Python would cost three times as much.
    _local: torch.Tensor = property(operator.attrgetter("_shard_state.local"))  # type: ignore[assignment]
    _spec: ShardSpec = property(operator.attrgetter("_shard_state.spec"))  # type: ignore[assignment]
    _unit_ref: weakref.ref[UnitPort] | None = property(  # type: ignore[assignment]
        operator.attrgetter("_shard_state.unit_ref")
    )

    @staticmethod
    def __new__(
        cls, local: torch.Tensor, spec: ShardSpec, *, unit: Any = None, requires_grad: bool = False
    ) -> ShardTensor:
        assert local.shape == (spec.length,)
        self = cls._wrap(local, spec, None if unit is None else weakref.ref(unit))
        self._shard_state.is_parameter = unit is not None
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.requires_grad_(True)
        return self

    @property
    def _unit(self) -> UnitPort | None:
        """The unit of a parameter; None for any other tensor, and where the unit is gone."""
        ref = self._shard_state.unit_ref
        return None if ref is None else ref()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # torch.Tensor.__init__ would look at the arguments.
        pass

    @classmethod
    def _wrap(
        cls,
        local: torch.Tensor,
        spec: ShardSpec,
        unit_ref: weakref.ref[Any] | None = None,
        flat: torch.Tensor | None = None,
    ) -> ShardTensor:
        # Hot: every gradient of every step is made here, and keyword arguments would add a third to its time. By position:
        # cls, size, strides, storage_offset, memory_format, dtype, layout, device.
        self: ShardTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, spec.shape, spec.stride, None, None, local.dtype, local.layout, local.device
        )
        self._shard_state = ShardState(local, spec, unit_ref, flat)
        return self

    @classmethod
    def from_full(cls, full: torch.Tensor, spec: ShardSpec) -> ShardTensor:
        """Return the shard of a plain tensor of the global shape, in memory of its own. Not collective."""
        return cls._wrap(shard_of_full(full.detach(), spec).clone(), spec)

    # -- the gradient and the values ------------------------------------------------------------------------------
    # Every step reads and clears each `.grad`. A property costs a fraction of `__torch_function__`, but each of its calls counts.
    @property
    def grad(self) -> Any:  # type: ignore[override]
        """The gradient: a ShardTensor, cut alike, or None."""
        ref = self._shard_state.unit_ref
        unit: Any = None if ref is None else ref()
        if unit is not None and (unit.is_summoned or unit.runtime.awaits_votes):
            unsharded = attributes.gradient_holder(unit, self)
            if unsharded is not None:
                return unsharded.grad
        with torch._C.DisableTorchFunctionSubclass():
            grad = own_grad(self)
        if grad is None and unit is not None and self._shard_state.is_parameter:
            unit.runtime.check_grad_reader()
        return grad

    @grad.setter
    def grad(self, value: Any) -> None:
        ref = self._shard_state.unit_ref
        unit: Any = None if ref is None else ref()
        if unit is not None and (unit.is_summoned or unit.runtime.awaits_votes):
            unsharded = attributes.gradient_holder(unit, self)
            if unsharded is not None:
                unsharded.grad = value
                if value is not None:
                    return
        with torch._C.DisableTorchFunctionSubclass():
            set_own_grad(self, None if value is None else attributes.as_gradient(value, self))

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Any:  # type: ignore[override]
        """Another ShardTensor of the same shard, without a gradient."""
        return attributes.get_data(self)

    @data.setter
    def data(self, value: Any) -> None:
        attributes.set_data(self, value)

    # -- the two dispatch mechanisms ------------------------------------------------------------------------------
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in GETTERS:  # hot: read many times a step
            visible: Any = None
            if func == DTYPE:  # `is` would not do: each read makes a new object
                visible = torch_function.computed_in(args[0])
            elif func == DEVICE:
                visible = torch_function.computed_on(args[0])
            if visible is not None:
                return visible
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if len(types) > 1 and not all(issubclass(kind, torch.Tensor) for kind in types):
            return NotImplemented  # leave it to the other class, such as one that loads its tensor from a file at this call
        return torch_function.call(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatch.dispatch(func, args, kwargs or {})

    # -- the shard and the full tensor ----------------------------------------------------------------------------
    def to_local(self) -> torch.Tensor:
        """Return this rank's shard: 1-D, memory order, shared memory, without gradient. Not collective."""
        unit = self._unit
        if unit is not None:
            unit.exposed = True
        writes = pending_writes_of(self)
        return self._local if writes is None else writes.export(self)

    def full_tensor(self) -> torch.Tensor:
        """Return the full tensor: plain, original shape and strides, new memory, without gradient.

        Collective: call on all ranks, each of which allocates the full tensor. One rank alone may call it for a parameter, and
        for what it has computed from parameters, while the others do something else.
        """
        return derivation.full_tensor(self)

    def _full_for_file(self) -> torch.Tensor | None:
        """Return the full tensor for a file that this rank writes, whatever the others do. Not collective.

        Returns None if the values can't be read alone, and for a tensor that is no parameter, nor computed from some, nor from an
        optimizer's ``state_dict()``, nor a copy of such a tensor.
        """
        named = self._shard_state.state_of
        if named is None:
            return derivation.full_for_file(self)
        unit, original = named.unit_ref(), named.original(self)
        if unit is None or original is None:
            return None
        found: torch.Tensor | None = unit.runtime.optimizer_states.read(named.part, original)
        return found

    # -- copying, showing, saving ---------------------------------------------------------------------------------
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        unit = self._unit
        if unit is not None and self._shard_state.is_parameter:
            return unit.deepcopy_param(self, memo)
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise RuntimeError(
                    f"only leaf tensors can be deep-copied; this one was computed from {self._spec.name}."
                )
            result = ShardTensor(self._local.detach().clone(), self._spec, requires_grad=self.requires_grad)
            memo[id(self)] = result
            grad = own_grad(self)
            if grad is not None:
                set_own_grad(result, copy.deepcopy(grad, memo))
        result._shard_state.copy_marks(self._shard_state)
        changes.remember(result, self)
        for key, value in self.__dict__.items():
            if key != STATE:
                result.__dict__[key] = copy.deepcopy(value, memo)
        return result

    def _plain(self) -> torch.Tensor | None:
        """Return the full tensor, as an ``nn.Parameter`` for a parameter; None as :meth:`_full_for_file`. Not collective."""
        full = self._full_for_file()
        if full is None or not getattr(self, "_is_param", False):
            return full
        param = torch.nn.Parameter(full, self.requires_grad)
        param.__dict__.update((key, value) for key, value in self.__dict__.items() if key not in OWN_ATTRIBUTES)
        return param

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self._plain()
        if plain is not None:
            return plain.__reduce_ex__(protocol)
        raise ShardPicklingError(
            f"rank {self._spec.world_rank}: pickling (torch.save) the sharded {self._spec.name} would save one rank's shard. "
            f"{self._spec.comm.watchdog.saving_advice}"
        )

    # A program that prints a parameter wants its values. Debuggers, tracebacks and containers call `repr`, from any thread and at
    # any point of a step, so that `repr` sends nothing.
    def __str__(self) -> str:
        return self.__format__("")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec, local = self._spec, self._local
        with torch._C.DisableTorchFunctionSubclass():
            grad = ", requires_grad=True" if self.requires_grad else ""
        of = spec.numel if spec.part is None else f"the part {spec.part.sizes} at {spec.part.offsets}"
        return (
            f"ShardTensor({spec.name}, shape={tuple(spec.shape)}, dtype={local.dtype}, device={str(local.device)!r}, "
            f"rank {spec.world_rank} of {spec.comm.size} holds [{spec.start}, {spec.stop}) of {of}: "
            f"{local.detach()!r}{grad})"
        )

    def __format__(self, format_spec: str) -> str:
        if not format_spec:
            try:
                plain = self._plain()
            except ShardError:  # the other ranks have stepped already, or are gone
                plain = None
            return repr(self) if plain is None else format(plain, "")
        return format(self.item(), format_spec) if self.dim() == 0 else super().__format__(format_spec)

    # -- wrapper subclass protocol --------------------------------------------------------------------------------
    @property
    def __tensor_flatten__(self) -> Any:
        # Parameters and conversions of them lack this attribute. Otherwise module.half() and module.to() would swap new
        # tensors into the parameters, past the unit, instead of assigning `.data`.
        if self._unit_ref is not None or self._shard_state.converted:
            raise AttributeError("__tensor_flatten__")
        return lambda: (["_local"], self._spec)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], spec: ShardSpec, size: Any, stride: Any) -> ShardTensor:
        return ShardTensor._wrap(inner["_local"], spec)

    # -- torch.distributed.checkpoint protocol --------------------------------------------------------------------
    def _chunks(self) -> tuple[Box, ...]:
        spec = self._spec
        if spec.numel == 0 and spec.rank == 0:  # so that a checkpoint knows that the tensor exists
            return (Box((0,) * len(spec.shape), tuple(spec.shape)),)
        return spec.boxes()

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self._chunks()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, i),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self._spec.shape),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        spec = self._spec
        for box, values in boxes_in(self._local.detach(), spec.layout.slots[spec.index].order, self._chunks()):
            if index.offset is None or tuple(index.offset) == box.offsets:
                return values
        raise ValueError(f"rank {spec.world_rank} holds no part of {spec.name} at {tuple(index.offset)}.")


# These modules import ShardTensor, which has to be defined before. For the same reason the package imports this module first.
from . import attributes, changes, derivation, dispatch, torch_function  # noqa: E402
from .function_sets import DEVICE, DTYPE, GETTERS  # noqa: E402
