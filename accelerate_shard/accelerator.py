"""The Accelerator: Accelerate's own, with models sharded where that one would wrap them in DistributedDataParallel.

Only what has to differ is overridden; everything else is Accelerate's. ``distributed_type`` stays ``MULTI_GPU`` or
``MULTI_CPU``, so that scripts, the Trainer and the utilities take the ways they take under DDP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

import torch_shard
from torch_shard import Engine, ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.precision import for_autocast, precision_of

from .activation_checkpointing import checkpoint_layers
from .ddp_kwargs import config_with, register_hook
from .layers import with_layer_units
from .plugin import ShardPlugin
from .settings import chosen_plugin, refuse_other_engines
from .wrapped import engine_of, inner

__all__ = ["Accelerator"]

_SIGNATURE = inspect.signature(accelerate.Accelerator.__init__)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` whose ``prepare`` shards models: parameters, gradients and optimizer state.

    Takes the arguments of Accelerate's class, and:

    Args:
        shard_plugin: a :class:`~accelerate_shard.ShardPlugin` or a :class:`torch_shard.ShardConfig`; the defaults by default.
        fsdp_plugin: settings for torch's FSDP, which are translated; what has no meaning here is named in a warning.

    ``mixed_precision="bf16"`` and ``"fp16"`` gather parameters in that dtype, norms excepted, and autocast is on, unless
    `shard_plugin` has a ``precision`` of its own (``Precision()``: autocast alone).

    Raises:
        ConfigError: settings of other engines (DeepSpeed, Megatron-LM, ...), and settings that contradict each other.
    """

    def __init__(self, *args: Any, shard_plugin: ShardPlugin | ShardConfig | None = None, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        refuse_other_engines(given)
        self.shard_plugin = chosen_plugin(shard_plugin, given.pop("fsdp_plugin", None))
        given.pop("self")
        super().__init__(**given)

    # -- models ---------------------------------------------------------------------------------------------------
    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place, with the forward under autocast where ``mixed_precision`` says so. Collective.

        Args:
            device_placement: has no meaning here: shards are on ``self.device``.
            evaluation_mode: sharded all the same; a model that is only evaluated fits where a sharded one does.

        Raises:
            ConfigError: a model that was sharded by something else than this Accelerator.
            SetupError: see :func:`torch_shard.shard`.
        """
        if not getattr(model, "_is_accelerate_prepared", False):
            self._shard(inner(model))
        # Not moved: sharding did that unit by unit. Not wrapped either, which is what evaluation_mode means there.
        prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        return prepared

    def _shard(self, model: nn.Module) -> Engine:
        if torch_shard.engine_of(model) is not None:
            raise ConfigError("prepare: the model is sharded already; give prepare() the plain model.")
        config = with_layer_units(self.shard_plugin.config(), model, self.shard_plugin.layer_classes)
        checkpoint_layers(model, self.shard_plugin, config)
        config = config_with(self.ddp_handler, config)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.mixed_precision)
        if dtype is not None and self.native_amp:
            config = for_autocast(config, model, dtype, f"mixed_precision={self.mixed_precision!r}")
            if self.shard_plugin.fp32_masters:
                precision = dataclasses.replace(precision_of(config.precision), master_dtype=torch.float32)
                config = dataclasses.replace(config, precision=precision)
        engine = torch_shard.shard(model, config, mesh=self._mesh())
        register_hook(self.ddp_handler, engine)
        return engine

    def _mesh(self) -> Any:
        """None for the default group; on GPUs a mesh of their kind, so that parameters still on the CPU move there."""
        if self.device.type == "cpu" or not dist.is_initialized():
            return None
        from torch.distributed.device_mesh import DeviceMesh

        group: Any = dist.group.WORLD
        return DeviceMesh.from_group(group, self.device.type)

    # -- optimizers -------------------------------------------------------------------------------------------------
    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, whose parameters may be sharded already, or be sharded later. Not collective.

        Args:
            device_placement: has no meaning here: state is where its parameter is.
        """
        return super().prepare_optimizer(optimizer, device_placement=False)

    # -- gradients --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Around all micro-batches of an accumulation but the last.

        By default gradients are reduced at each of them and accumulate sharded, which needs no memory for whole
        gradients. ``ShardPlugin(defer_gradient_sync=True)`` reduces once, as DDP does.
        """
        engine = engine_of(model)
        if engine is None:
            with super().no_sync(model):
                yield
        else:
            with engine.no_sync() if self.shard_plugin.defer_gradient_sync else contextlib.nullcontext():
                yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """The backward inside reduces gradients, though its forward ran under :meth:`no_sync`."""
        engine = engine_of(model)
        if engine is None:
            # Not by its name, which enable() makes this class's.
            with super(Accelerator, Accelerator).trigger_sync_in_backward(model):
                yield
            return
        before = engine.require_backward_grad_sync
        engine.require_backward_grad_sync = True
        try:
            yield
        finally:
            engine.require_backward_grad_sync = before
