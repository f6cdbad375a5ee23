"""torch's FSDP2 over :func:`torch_shard.shard`: ``fully_shard``, and the methods of the modules that it was called with."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.utils.hooks import RemovableHandle

from ..comm.streams import current_streams
from ..config.precision import NONE, precision_of
from ..engine import Engine, engine_of
from ..errors import ConfigError, ShardPicklingError
from ..runtime.mixed_precision_hooks import cast as in_dtype
from ..runtime.mixed_precision_hooks import cast_outputs
from ..unshard.gathered import units_of
from . import deferred_wrap
from .module_mixin import WrappedModule, class_over
from .translate_settings import of_fully_shard, unused

_AUTOMATIC = "units are gathered ahead in the order of the last step; ShardConfig.prefetch says how many"


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  (frozen; torch's signature)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Make `module` a unit, or a sharded model if it is the outermost module, as torch's fully_shard does.

    This is not collective: the model is sharded when it is first used. Parameters become ShardTensors, not DTensors. Parameters
    of the outermost module that are in no unit are divided into units automatically.

    Args:
        module: a module, which keeps its identity; its class becomes a subclass of its own and of :class:`FSDPModule`. A list
            stands for several calls.
        mesh: the ranks, as a DeviceMesh of one dimension, or of two (replicate, shard) for hybrid sharding; all ranks by default.
        reshard_after_forward: False for every module inside keeps parameters until backward (``shard_grad_op``). A number of
            ranks keeps them sharded among that many. Else they are resharded after forward.
        shard_placement_fn: has no effect, since shards are 1-D ranges; a mesh for single parameters is refused.
        mp_policy: the dtypes, as in :class:`torch_shard.Precision`; inner modules have the same policy, or none.
        offload_policy: ``CPUOffloadPolicy`` for any module offloads the whole model, as :class:`torch_shard.Offload` does.
        ignored_params: parameters that are not sharded, nor reduced.
        dp_mesh_dims: must be None.

    Returns:
        `module`.

    Raises:
        ConfigError: an argument asks for what the engine does not have, or a module has no forward or was wrapped before.
    """
    arguments = dict(locals())
    modules: list[nn.Module] = list(module) if isinstance(module, (list, tuple)) else [module]
    for each in modules:
        if not isinstance(each, nn.Module):
            raise ConfigError(
                f"fully_shard: module must be a torch.nn.Module or a list of them, not {type(each).__name__}."
            )
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is nn.Module.forward:
            raise ConfigError(f"fully_shard: a {type(each).__name__} has no forward; call it for each module in it.")
        if deferred_wrap.mark_of(each) is not None:
            raise ConfigError(f"fully_shard: this {type(each).__name__} is wrapped already.")
    request = of_fully_shard(modules, arguments)
    for each in modules:
        kind = type(each)
        made = class_over(FSDPModule, kind, f"FSDP{kind.__name__}", {})
        deferred_wrap.leave_mark(each, request)
        each.__class__ = made  # type: ignore[assignment]
    return module


class UnshardHandle:
    """The result of :meth:`FSDPModule.unshard` with `async_op`."""

    _module: nn.Module | None = None

    def wait(self) -> None:
        """Make the module hold its full parameters when this returns. Collective."""
        module, self._module = self._module, None
        if module is not None:
            _open(module)


class FSDPModule(WrappedModule):
    """torch's methods for modules that :func:`fully_shard` was called with.

    The class stands before the module's own class. Methods that only ask for another order or place of communication have no
    effect, and log that once.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain module of the module's own class, as in ``Sequential[1:3]``."""
        return cls._wrapped_class(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        other = object.__new__(type(self))
        memo[id(self)] = other
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        deferred_wrap.apply_sync(cast(nn.Module, other))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(
            "a model of fully_shard can't be pickled: one rank would write its own shards. Save the result of "
            "torch_shard.engine_of(model).state_dict()."
        )

    # -- full parameters ----------------------------------------------------------------------------------------
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Make the module hold its own full parameters, except those of wrapped modules inside. Collective.

        This lasts until :meth:`reshard`, or the next forward of a wrapped module of the model. Changes are lost.

        Args:
            async_op: gather when the handle's ``wait()`` is called; the next forward gathers in any case.

        Returns:
            A handle with `async_op`, else None.
        """
        handle = UnshardHandle()
        handle._module = cast(nn.Module, self)
        if async_op:
            unused("FSDPModule.unshard", **{"async_op=True": f"wait() gathers; {_AUTOMATIC}"})
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Undo :meth:`unshard`, which is collective; without it, modules hold their shards anyway."""
        _close(cast(nn.Module, self))

    # -- gradients ----------------------------------------------------------------------------------------------
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backward reduces gradients. Not collective, but all ranks must use it alike.

        While it is off for some modules, reductions of the whole model are deferred, and :meth:`Optimizer.step` refuses the
        gradients.

        Args:
            requires_gradient_sync: False accumulates on this rank, as :meth:`Engine.no_sync` does.
            recurse: set it for the wrapped modules inside, too.
        """
        for mark in self._marks(recurse):
            mark.sync = bool(requires_gradient_sync)
        deferred_wrap.apply_sync(deferred_wrap.root_of(cast(nn.Module, self)))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of the gradients of this module's own parameters by `factor`, in place of the number of ranks.

        Raises:
            ConfigError: `factor` is not a positive number, or a communication hook is registered.
            ShardError: reductions of gradients are deferred.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise ConfigError(f"set_gradient_divide_factor: factor must be a positive number, not {factor!r}.")
        module = cast(nn.Module, self)
        engine = engine_of(deferred_wrap.root_of(module))
        if engine is not None:
            deferred_wrap.divide_by(engine, module, float(factor))
        for mark in self._marks(False):
            mark.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Do what :meth:`set_gradient_divide_factor` does; this is its older name."""
        self.set_gradient_divide_factor(factor)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: parameters without a gradient on some ranks are always reduced rightly."""

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Log a warning: with hybrid sharding gradients are all-reduced each time, which gives the same sum."""
        (own,) = self._marks(False)
        if not requires_all_reduce and getattr(own.request.mesh, "ndim", 1) == 2:
            unused("FSDPModule", set_requires_all_reduce="gradients are all-reduced each time, with the same sum")

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Log a warning: every backward waits for its reductions."""
        if not is_last_backward:
            unused("FSDPModule", set_is_last_backward="every backward waits for its reductions")

    # -- when parameters are resharded --------------------------------------------------------------------------
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change the argument of :func:`fully_shard`; this has no effect once the model is sharded."""
        if deferred_wrap.is_pending(cast(nn.Module, self)):
            for mark in self._marks(recurse):
                mark.request = dataclasses.replace(mark.request, reshard=reshard_after_forward)
        else:
            unused(
                "FSDPModule", set_reshard_after_forward="the model is sharded already; call it before the first forward"
            )

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Log a warning: parameters are resharded after backward; ``ShardConfig(strategy="shard_optim")`` keeps them."""
        if not reshard_after_backward:
            unused("FSDPModule", set_reshard_after_backward="parameters are resharded after backward")

    # -- prefetch -----------------------------------------------------------------------------------------------
    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set how many modules are gathered ahead. Which ones are follows from the order of use."""
        self._prefetch(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Do what :meth:`set_modules_to_forward_prefetch` does."""
        self._prefetch(modules, "set_modules_to_backward_prefetch")

    def _prefetch(self, modules: list[FSDPModule], what: str) -> None:
        if deferred_wrap.is_pending(cast(nn.Module, self)):
            for mark in self._marks(False):
                mark.prefetch = max(mark.prefetch, len(modules))
        else:
            unused("FSDPModule", **{what: _AUTOMATIC})

    # -- how it communicates ------------------------------------------------------------------------------------
    def set_custom_all_gather(self, comm: Any) -> None:
        """Raise a ConfigError: the engine's collectives can't be replaced."""
        raise _custom("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raise a ConfigError; :meth:`Engine.register_comm_hook` takes a function that reduces."""
        raise _custom("set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Raise a ConfigError; :meth:`Engine.register_comm_hook` takes a function that reduces."""
        raise _custom("set_all_reduce_hook")

    def set_post_optim_event(self, event: Any) -> None:
        """Make the current stream, after which parameters are gathered, wait for `event`."""
        current_streams().wait(event)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Do nothing: gradients are summed wherever the backend can't take their mean."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Log a warning: units that backward does not need are found in any case."""
        if not unshard_in_backward:
            unused(
                "FSDPModule",
                set_unshard_in_backward="units that backward does not need are not gathered in any case",
            )

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Log a warning: gathers and reductions have a process group each.

        ``ShardConfig(single_communicator=True)`` gives them one.
        """
        if not enable:
            unused("FSDPModule", set_separate_reduce_scatter_group="they have a process group each")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Log a warning: at most two reductions are in flight."""
        unused("FSDPModule", set_reduce_scatter_max_input_buffers="at most two reductions are in flight")

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Log a warning: memory comes from torch's allocator."""
        if enable:
            unused("FSDPModule", set_allocate_memory_from_process_group_for_comm="memory comes from torch's allocator")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Log a warning: memory comes from torch's allocator."""
        unused("FSDPModule", set_symm_mem_for_comm="memory comes from torch's allocator")

    def reset_iter_state(self) -> None:
        """Do nothing: after an exception in forward or backward the model is ready for the next step anyway."""

    def _marks(self, recurse: bool) -> list[deferred_wrap.Mark]:
        module = cast(nn.Module, self)
        own = deferred_wrap.mark_on(module)
        return [own, *(mark for *_, mark in deferred_wrap.marks_in(module))] if recurse else [own]


def _custom(what: str) -> ConfigError:
    return ConfigError(
        f"FSDPModule.{what}: the engine's collectives can't be replaced; a function of yours can reduce gradients, "
        "torch_shard.engine_of(model).register_comm_hook()."
    )


# -- unshard --------------------------------------------------------------------------------------------------------------


def _open(module: nn.Module) -> None:
    mark = deferred_wrap.mark_on(module)
    engine = deferred_wrap.engine_around(module)
    params = deferred_wrap.own_params(module)
    if mark.opened is not None or not params:
        return
    stack = contextlib.ExitStack()
    stack.enter_context(engine.gathered(params))
    root = engine.model
    for each in {id(m): m for m in (root, *(m for _, m, _ in deferred_wrap.marks_in(root)), module)}.values():
        # So that a forward gathers as usual.
        handle: RemovableHandle = each.register_forward_pre_hook(functools.partial(_close, module), prepend=True)
        stack.callback(handle.remove)
    mark.opened = stack


def _close(module: nn.Module, *_: object) -> None:
    mark = deferred_wrap.mark_of(module)
    if mark is not None and mark.opened is not None:
        stack, mark.opened = mark.opened, None
        stack.close()


# -- functions ------------------------------------------------------------------------------------------------------------


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a wrapped module shard the model and cast as its forward does. Not collective.

    Parameters that methods use are gathered anyway, so this is needed only for a method that runs before any forward, or whose
    inputs and outputs the module's ``mp_policy`` is to cast. Other modules are left alone.

    Raises:
        ConfigError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ConfigError(f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}.")
    function = getattr(type(module), method_name, None)

    @functools.wraps(method)
    def sharded_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs, outputs = _casts(self, deferred_wrap.engine_around(self))
        if inputs is not None:
            args, kwargs = in_dtype(args, inputs), in_dtype(kwargs, inputs)
        result = method(*args, **kwargs) if function is None else function(self, *args, **kwargs)
        return result if outputs is None else cast_outputs(result, outputs)

    setattr(module, method_name, types.MethodType(sharded_first, module))


def _casts(module: nn.Module, engine: Engine) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes to which a wrapped module's policy casts inputs and outputs; None where it leaves them."""
    asked, applied = deferred_wrap.mark_on(module).request.precision or NONE, precision_of(engine.config.precision)
    inputs = applied.param_dtype if asked.param_dtype is not None and applied.cast_inputs else None
    if inputs is not None:
        params = deferred_wrap.own_params(module)
        units = units_of(engine._runtime, params)
        # Full parameters that the program has gathered are as they are stored.
        if units and all(unit.is_summoned for unit in units):
            inputs = next((p.dtype for p in params if p.is_floating_point()), inputs)
    return inputs, asked.output_dtype


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Do nothing: models over the same ranks always share streams."""
