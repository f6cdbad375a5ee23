"""torch's class FullyShardedDataParallel, its arguments and methods, over :func:`torch_shard.shard`.

``FSDP(module)`` returns a second object over the module's own ``__dict__``, of a class that is both FullyShardedDataParallel and
the module's class. So the wrapped model has the module's names, parameters, hooks and methods, without a prefix; ``.module`` is
the module that was given.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from .. import optim_state as _optim_state
from .. import state_dict_type as _state_dict_type
from ..comm.process_groups import default_group
from ..engine import Engine, engine_of
from ..errors import ConfigError, ShardPicklingError
from ..optim_state import OptimStateKeyType as OptimStateKeyType
from . import auto_wrap, deferred_wrap
from .api import *  # noqa: F403  (torch's module has these names, too)
from .api import (
    BackwardPrefetch,
    CPUOffload,
    MixedPrecision,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictType,
)
from .module_mixin import WrappedModule, class_over
from .translate_settings import of_fsdp, unused, warn_once
from .wrap import CustomPolicy, ModuleWrapPolicy

_P = ParamSpec("_P")
_R = TypeVar("_R")


_NAMES = (
    "FullyShardedDataParallel: modules and parameters have the names of the plain model, without torch's "
    "'_fsdp_wrapped_module.'. Code that selects by names with that prefix selects nothing; leave the prefix out."
)


def _of_wrapped(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return `function`, which checks first that its argument `model` is the outermost wrapped module."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["model"] = _model(bound.arguments["model"], function.__name__)
        return function(*bound.args, **bound.kwargs)

    return checked


def _for_models(function: Callable[..., _R]) -> Callable[..., _R]:
    """Return `function` for all wrapped models in a module; it returns the result for the first one."""

    @functools.wraps(function)
    def for_models(module: nn.Module, *args: Any, **kwargs: Any) -> _R:
        results = [function(model, *args, **kwargs) for model in _models(module, function.__name__)]
        return results[0]

    return for_models


class FullyShardedDataParallel(WrappedModule, nn.Module):
    """torch's FullyShardedDataParallel, with its arguments.

    The model is sharded when the outermost wrapped module is first used or, with `auto_wrap_policy`, at once, which is
    collective. Parameters keep their names, shapes and identity, whatever `use_orig_params` is. Parameters of the outermost
    module that are in no wrapped module inside are divided into units automatically.

    Args:
        module: a module, which keeps its class; submodules that `auto_wrap_policy` chooses are replaced by wrapped ones.
        process_group: the ranks; a pair (shard, replicate) for the hybrid strategies.
        sharding_strategy: the strategy; the one of the outermost module is used.
        cpu_offload: ``CPUOffload(offload_params=True)`` for any module offloads the whole model, as :class:`torch_shard.Offload`
            does.
        auto_wrap_policy: chooses submodules that are wrapped with the same arguments.
        backward_prefetch: None and ``BACKWARD_POST``, without `forward_prefetch`, turn prefetching off, in forward too.
        mixed_precision: the dtypes, as in :class:`torch_shard.Precision`; inner modules have the same, or none.
        ignored_modules, ignored_states: modules and parameters that are not sharded, nor reduced.
        param_init_fn: fills a module that is on the meta device; it must call ``to_empty()`` or replace the tensors.
        device_id: the device of the shards.
        sync_module_states: send rank 0's values. Without it each rank keeps its shard of its own values.
        forward_prefetch: turns prefetching on, in backward too; ``BACKWARD_PRE`` does the same.
        limit_all_gathers, use_orig_params: have no effect, since they are always on.
        device_mesh: the ranks, in place of `process_group`.

    Raises:
        ConfigError: an argument asks for what the engine does not have, or a module inside is sharded already.
        SetupError, UnavailableError: the model can't be sharded, as for :func:`torch_shard.shard`.
    """

    _fsdp_wrapped_module: nn.Module  # a slot of the classes that `_over` makes: the __dict__ belongs to both objects

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a wrapper over `module`, or from a wrapped module's class a plain module, as in ``Sequential[1:3]``."""
        if "_wrapped_class" in cls.__dict__:
            return cls._wrapped_class(*args, **kwargs)
        module = kwargs.get("module", args[0] if args else None)
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"FullyShardedDataParallel: module must be a torch.nn.Module, not {type(module).__name__}."
            )
        return _over(cls, module)

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Callable[..., Any] | ModuleWrapPolicy | CustomPolicy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: Any = None,
    ) -> None:
        # Not nn.Module.__init__: the __dict__ is the module's, and full.
        arguments = dict(locals())
        for name in ("self", "module", "auto_wrap_policy", "use_orig_params"):
            del arguments[name]
        for name in ("ignored_modules", "ignored_states"):  # may be generators, and are read for each wrapped module
            arguments[name] = None if arguments[name] is None else list(arguments[name])
        request = of_fsdp(arguments, has_policy=auto_wrap_policy is not None)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            unused("FullyShardedDataParallel", **{f"wrapping a {type(module).__name__}": "it has no forward"})
        if deferred_wrap.mark_of(module) is not None:
            if not isinstance(module, FullyShardedDataParallel):
                raise ConfigError(
                    f"FullyShardedDataParallel: this {type(module).__name__} is wrapped already; wrap what it returned then, or "
                    "nothing."
                )
            return  # wrapped twice: the inner call has everything
        if auto_wrap_policy is not None:
            wrapped = deferred_wrap.marks_in(module)
            if wrapped:
                raise ConfigError(
                    f"FullyShardedDataParallel: auto_wrap_policy wraps what is not wrapped yet, but {wrapped[0][0]} is. Leave "
                    "one of the two out."
                )
            chosen = auto_wrap.chosen_by(auto_wrap_policy, module, request.ignored, arguments)
            auto_wrap.register(module, [FullyShardedDataParallel(m, **own) for m, own in chosen.items()])
        deferred_wrap.leave_mark(module, request)
        warn_once(_NAMES)
        if auto_wrap_policy is not None:
            deferred_wrap.engine_around(module)

    # -- the module ---------------------------------------------------------------------------------------------
    @property
    def module(self) -> nn.Module:
        """The module that was wrapped; inside torch's checkpoint wrapper, the one inside that."""
        inner = self._fsdp_wrapped_module
        return inner._checkpoint_wrapped_module if isinstance(inner, ActivationWrapper) else inner  # type: ignore[return-value]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. The first call of the outermost wrapped module shards the model; all are collective."""
        return self._fsdp_wrapped_module(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # nn.Module's method would run the module's hooks a second time, and call a `forward` that was assigned to the module.
        return type(self).forward(self, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module in place, as ``nn.Module.compile`` does."""
        self._fsdp_wrapped_module.compile(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _ATTRIBUTES:  # the module's own attribute of that name comes first
                return _ATTRIBUTES[name](self)
            raise

    def _get_name(self) -> str:
        return f"{type(self).__name__}[{type(self._fsdp_wrapped_module).__name__}]"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        inner = copy.deepcopy(self._fsdp_wrapped_module, memo)
        if id(self) not in memo:  # copying the module may have copied this object, too
            other = memo[id(self)] = object.__new__(type(self))
            _bind(other, inner)
            deferred_wrap.apply_sync(inner)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(
            "a FullyShardedDataParallel model can't be pickled: one rank would write its own shards. Save its state_dict()."
        )

    # -- the tree -----------------------------------------------------------------------------------------------
    def check_is_root(self) -> bool:
        """Return True if no module around this one is wrapped. Not collective."""
        return deferred_wrap.root_of(self).__dict__ is self.__dict__

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return the wrapped modules in `module`, itself included. Not collective.

        Args:
            module: any module.
            root_only: leave out modules that are inside another wrapped one.
        """
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [m for m in found if m.check_is_root()] if root_only else found

    # -- training -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank; the first backward outside reduces their sum. See :meth:`Engine.no_sync`.

        As with torch's class, the backward must be inside, wherever its forward is.

        Raises:
            ConfigError: this is not the outermost wrapped module.
        """
        with deferred_wrap.without_sync(self._root_engine("no_sync")):
            yield

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        The arguments and the result are those of :meth:`Engine.clip_grad_norm_`.

        Raises:
            ConfigError: this is not the outermost wrapped module.
        """
        return self._root_engine("clip_grad_norm_").clip_grad_norm_(max_norm, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Make `hook` reduce gradients; see :meth:`Engine.register_comm_hook`. Collective.

        Raises:
            ConfigError: this is not the outermost wrapped module, or the engine refuses the hook.
        """
        self._root_engine("register_comm_hook").register_comm_hook(state, hook)

    def _root_engine(self, what: str) -> Engine:
        if not self.check_is_root():
            raise ConfigError(
                f"FullyShardedDataParallel.{what}: {deferred_wrap.nested_name(self)} is inside a wrapped model; "
                "call it on that one."
            )
        return deferred_wrap.engine_around(self)

    # -- full parameters ----------------------------------------------------------------------------------------
    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Apply `fn` to each module with full parameters, and keep its changes. Collective once the model is sharded."""
        if deferred_wrap.is_pending(self):
            return super().apply(fn)
        engine = deferred_wrap.engine_around(self)
        if self.check_is_root():
            engine.apply(fn)
        else:
            with engine.gathered(self, write=True):
                _apply(self, fn)
        return self

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Make modules hold full parameters inside. Collective, on entering and on leaving; see :meth:`Engine.gathered`.

        All combinations of the arguments are allowed.

        Args:
            module: a wrapped model, a part of one, or any module with wrapped ones inside. Other modules are left alone.
            recurse: gather the wrapped modules inside `module`, too.
            writeback: keep changes made inside; with `rank0_only`, rank 0's changes.
            rank0_only: give the values to rank 0 only.
            offload_to_cpu: put the values on the CPU.
            with_grads: gather `.grad`, too.
        """
        options: dict[str, Any] = {"write": writeback, "grads": with_grads}
        if rank0_only:
            options["ranks"] = 0
        if offload_to_cpu:
            options["device"] = "cpu"
        with contextlib.ExitStack() as stack:
            for engine in _engines(module):
                # A model inside `module`, or the part that `module` is.
                inside = any(m.__dict__ is engine.model.__dict__ for m in module.modules())
                part = engine.model if inside else module
                target = part if recurse else deferred_wrap.own_params(part)
                stack.enter_context(engine.gathered(target, **options))
            yield

    # -- state dicts: the functions of torch_shard.state_dict_type, for the wrapped models in a module ----------
    set_state_dict_type = staticmethod(_for_models(_state_dict_type.set_state_dict_type))
    get_state_dict_type = staticmethod(_for_models(_state_dict_type.get_state_dict_type))

    @staticmethod
    @contextlib.contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """Do what :meth:`set_state_dict_type` does for a block."""
        given = (state_dict_type, state_dict_config, optim_state_dict_config)
        with contextlib.ExitStack() as stack:
            for model in _models(module, "state_dict_type"):
                stack.enter_context(_state_dict_type.state_dict_type(model, *given))
            yield

    # -- optimizer state: the functions of torch_shard.optim_state ---------------------------------------------
    full_optim_state_dict = staticmethod(_of_wrapped(_optim_state.full_optim_state_dict))
    sharded_optim_state_dict = staticmethod(_of_wrapped(_optim_state.sharded_optim_state_dict))
    shard_full_optim_state_dict = staticmethod(_of_wrapped(_optim_state.shard_full_optim_state_dict))
    flatten_sharded_optim_state_dict = staticmethod(_of_wrapped(_optim_state.flatten_sharded_optim_state_dict))
    scatter_full_optim_state_dict = staticmethod(_of_wrapped(_optim_state.scatter_full_optim_state_dict))
    rekey_optim_state_dict = staticmethod(_optim_state.rekey_optim_state_dict)
    optim_state_dict = staticmethod(_of_wrapped(_optim_state.optim_state_dict))
    optim_state_dict_to_load = staticmethod(_of_wrapped(_optim_state.optim_state_dict_to_load))


# -- the second object --------------------------------------------------------------------------------------------------


def _over(cls: type, module: nn.Module) -> Any:
    """Return an object of `cls` and of the module's class, over the module's ``__dict__``."""
    kind: Any = type(module)
    if not isinstance(module, FullyShardedDataParallel):
        namespace: dict[str, Any] = {"__slots__": ("_fsdp_wrapped_module",)}
        if kind.forward is nn.Module.forward:  # a module without a forward must not seem to have one
            namespace["forward"] = nn.Module.forward
        kind = class_over(cls, kind, cls.__name__, namespace)
    other = object.__new__(kind)
    _bind(other, module)
    return other


def _bind(wrapper: Any, module: nn.Module) -> None:
    object.__setattr__(wrapper, "__dict__", module.__dict__)
    object.__setattr__(wrapper, "_fsdp_wrapped_module", module)


def _request(wrapper: FullyShardedDataParallel, name: str) -> Any:
    mark = deferred_wrap.mark_of(wrapper)
    return None if mark is None else mark.request.arguments.get(name)


def _group(wrapper: FullyShardedDataParallel) -> Any:
    given = _request(wrapper, "process_group")
    return default_group() if given is None else given


_ATTRIBUTES: dict[str, Callable[[FullyShardedDataParallel], Any]] = {
    "process_group": _group,
    "rank": lambda wrapper: deferred_wrap.engine_around(wrapper).rank,
    "world_size": lambda wrapper: deferred_wrap.engine_around(wrapper).world_size,
    "compute_device": lambda wrapper: deferred_wrap.engine_around(wrapper).device,
    "mixed_precision": lambda wrapper: _request(wrapper, "mixed_precision") or MixedPrecision(),
    "cpu_offload": lambda wrapper: _request(wrapper, "cpu_offload") or CPUOffload(),
    **{
        name: functools.partial(_request, name=name)
        for name in ("sharding_strategy", "backward_prefetch", "forward_prefetch", "limit_all_gathers")
    },
}


def _apply(module: nn.Module, fn: Callable[[nn.Module], None]) -> None:
    for child in module.children():
        _apply(child, fn)
    fn(module)


# -- models in a module -------------------------------------------------------------------------------------------------


def _engines(module: nn.Module) -> list[Engine]:
    """Return the engine of the model that `module` is or is a part of, else those of all wrapped models inside it."""
    if deferred_wrap.mark_of(module) is not None:
        return [deferred_wrap.engine_around(module)]
    engine = engine_of(module)
    if engine is not None:  # the model was sharded by torch_shard.shard
        return [engine]
    roots = dict.fromkeys(deferred_wrap.root_of(part) for _, part, _ in deferred_wrap.marks_in(module))
    return [deferred_wrap.engine_around(root) for root in roots]


def _models(module: nn.Module, what: str) -> list[nn.Module]:
    """Return the sharded models in `module`."""
    if deferred_wrap.mark_of(module) is not None and deferred_wrap.root_of(module).__dict__ is not module.__dict__:
        raise ConfigError(
            f"FullyShardedDataParallel.{what}: {deferred_wrap.nested_name(module)} is a part of a wrapped model, which has "
            "one setting; pass the model."
        )
    found = [engine.model for engine in _engines(module)]
    if not found:
        raise ConfigError(f"FullyShardedDataParallel.{what}: nothing in this {type(module).__name__} is wrapped.")
    return found


def _model(module: nn.Module, what: str) -> nn.Module:
    found = _models(module, what)
    if len(found) > 1 or engine_of(module) is None:
        raise ConfigError(
            f"FullyShardedDataParallel.{what}: model must be the outermost wrapped module; this {type(module).__name__} only "
            "contains such."
        )
    return found[0]
