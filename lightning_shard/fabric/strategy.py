"""Fabric's strategy for both namespaces: a mixin that the concrete classes put before ParallelStrategy."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

import torch_shard
from torch_shard import Engine, ShardConfig, ShardTensor
from torch_shard.activation_checkpointing import checkpointed_layers
from torch_shard.errors import ConfigError
from torch_shard.frontend import clip_norm, engines_over, explained_step, limit_values, word_remedies

from ..strategy import precision as _precision
from ..strategy.metric_states import move_states
from ..strategy.processes import ProcessesMixin
from ..strategy.settings import SettingsMixin, same_config
from ..strategy.signature import show_settings
from .checkpoint import FabricCheckpointMixin
from .forward_module import ForwardModule, inner, unwrapped

_HANDLE = "fabric.strategy.engine_of(model)"
_SAVING = (
    'Use fabric.save(path, model.state_dict()) instead, or fabric.save(path, {"model": model, "optimizer": optimizer}), called '
    "on all ranks."
)


class FabricStrategyMixin(FabricCheckpointMixin, ProcessesMixin, SettingsMixin):
    """Trains under Fabric with parameters, gradients and optimizer state sharded over the ranks; otherwise as DDP does.

    Args:
        config: the settings of sharding; keyword arguments that are fields of :class:`~torch_shard.ShardConfig` change it on top,
            as in ``ShardFabricStrategy(strategy="shard_grad_op", prefetch=2)``.
        accelerator: the accelerator, which Fabric normally gives.
        parallel_devices: the devices of this node's ranks, which Fabric normally gives.
        cluster_environment: the cluster's environment, which Fabric normally gives.
        checkpoint_io: the plugin that reads and writes files, which Fabric normally gives.
        precision: the precision plugin, which Fabric normally gives. With ``bf16-mixed`` and ``16-mixed``
            parameters that autocast casts are gathered in its dtype, unless `config` has a ``precision`` of its own
            (``Precision()``: autocast alone).
        **settings: the fields of :class:`~lightning_shard.strategy.settings.StrategySettings` and of ``ShardConfig``.

    Raises:
        ConfigError: a setting is unknown or has a bad value.
    """

    def __init__(
        self,
        config: ShardConfig | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **settings: Any,
    ) -> None:
        self._keep_settings(config, {"defer_gradient_sync": True, **settings})
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = _BackwardSync(self)
        self._modules: list[weakref.ref[nn.Module]] = []  # the modules that this strategy has sharded, in order

    # -- Fabric(): what the connector sets ----------------------------------------------------------------------------
    @property
    def precision(self) -> Any:
        """The precision plugin."""
        return self._precision if self._precision is not None else self._private.Precision()

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            _precision.check(plugin, self._private, "ShardFabricStrategy")
        self._precision = plugin

    def _set_world_ranks(self) -> None:
        self.set_world_ranks()

    # -- set-up -------------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """Create parameters on the CPU inside ``fabric.init_module``; with `empty_init` on the meta device.

        ``fabric.setup`` then gives memory and initial values to the shards, unit by unit.
        """
        # Not on the device: sharding moves them there, unit by unit.
        meta = torch.device("meta") if empty_init else contextlib.nullcontext()
        with meta, self.precision.module_init_context():
            yield

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module without parameters, such as a metric, to the device.

        Modules with parameters stay where they are: ``fabric.setup`` calls this before it shards, which moves them unit by unit.
        """
        if next(module.parameters(), None) is None:
            module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, and wrap it. Collective.

        Optimizers that were made before or are made afterwards hold its parameters.

        Raises:
            ConfigError: the module is sharded already, with other settings.
            SetupError: see :func:`torch_shard.shard`.
        """
        module = inner(module)
        config = self._engine_config(self.precision, module)
        engine = torch_shard.engine_of(module)
        if engine is None:
            with checkpointed_layers(module, self._checkpointed, config.units, self._offloaded):
                engine = torch_shard.shard(module, config, mesh=self.root_device)
            word_remedies(engine, _HANDLE, _SAVING)
        elif not same_config(engine.config, config) or engine.device != self.root_device:
            raise ConfigError(
                "fabric.setup: the module is sharded already, with other settings. Give back the plain module first: "
                "strategy.engine_of(module).close()."
            )
        self._modules = [ref for ref in self._modules if ref() not in (None, module)] + [weakref.ref(module)]
        move_states(module, self.root_device)
        return ForwardModule(module)

    def setup_optimizer(self, optimizer: Any) -> Any:
        """Make the engines see the steps of an optimizer of any class, and return it.

        An optimizer may hold parameters of several modules that were set up one by one. Its step is one step over all of them.
        """
        for engine in self._engines_of(optimizer):
            engine.attach(optimizer)
        return optimizer

    # -- steps --------------------------------------------------------------------------------------------------------
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as Lightning does; an error that memory has run out says what holds it."""
        with explained_step(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale the gradients of this optimizer's parameters, of all its modules, to a norm of at most `max_norm`. Collective.

        Raises:
            NonFiniteError: a RuntimeError, on all ranks, with `error_if_nonfinite`, before anything has changed.
            ShardError: the gradients are not reduced yet (``no_backward_sync``).
        """
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        return clip_norm(self._engines(), parameters, float(max_norm), float(norm_type), error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: Any, clip_val: float) -> None:
        """Limit each element of the gradients of this optimizer's parameters to ``[-clip_val, clip_val]``."""
        self.precision.unscale_gradients(optimizer)
        limit_values(self._engines(), list(self.precision.main_params(optimizer)), float(clip_val))

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over the ranks, and anything else as it is. Collective."""
        return self.reduce(tensor, group, reduce_op)

    # -- for users ----------------------------------------------------------------------------------------------------
    def engine_of(self, module: Any) -> Engine:
        """Return the engine of a module, as ``fabric.setup`` took it or gave it back, compiled or not.

        Raises:
            ConfigError: the module is not sharded.
        """
        module = unwrapped(module)
        engine = torch_shard.engine_of(module)
        if engine is None:
            raise ConfigError(f"engine_of: {type(module).__name__} is not sharded; give it to fabric.setup first.")
        return engine

    # -- engines ------------------------------------------------------------------------------------------------------
    @property
    def engine_or_none(self) -> Engine | None:
        """The engine that coordinates the ranks: of the module that is saved or loaded, else of the last one set up."""
        if self._coordinator is not None:
            return self._coordinator
        # Not the first one: Python may collect a module that is gone later on one rank than on another.
        engines = self._engines()
        return engines[-1] if engines else None

    def _engines(self) -> list[Engine]:
        modules = [ref() for ref in self._modules]
        found = [torch_shard.engine_of(module) for module in modules if module is not None]
        return [engine for engine in found if engine is not None]

    def _engines_of(self, optimizer: Any) -> list[Engine]:
        """Return the engines whose parameters an optimizer holds, in the order of their set-up."""
        held = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, ShardTensor)]
        return engines_over(self._engines(), held) if held else []


show_settings(FabricStrategyMixin, defer_gradient_sync=True)


class _BackwardSync:
    """The object through which ``fabric.no_backward_sync`` accumulates gradients."""

    def __init__(self, strategy: SettingsMixin) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """Leave gradients unreduced in the forwards and backwards inside."""
        engine = torch_shard.engine_of(inner(module))
        if engine is None:
            raise TypeError(
                f"no_backward_sync takes a module that fabric.setup has sharded, not {type(module).__name__}."
            )
        return (
            engine.no_sync(hold=self._strategy._settings.defer_gradient_sync) if enabled else contextlib.nullcontext()
        )
