"""The Accelerator: Accelerate's own class, which shards models instead of wrapping them in DistributedDataParallel.

It overrides only what has to differ. ``distributed_type`` stays ``MULTI_GPU`` or ``MULTI_CPU``, so that scripts, the Trainer and
Accelerate's utilities behave as they do under DDP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, TypeVar

import accelerate
import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

import torch_shard
from torch_shard import Engine, ShardConfig, ShardTensor
from torch_shard.errors import ConfigError, ShardError
from torch_shard.frontend import (
    clip_norm,
    each_rank,
    for_autocast,
    group_timeout,
    limit_values,
    precision_of,
    wait_for_all,
    word_remedies,
    write_full_safetensors,
)

from ._private import PREPARED_LISTS, compiled_inner, refuse_local_sgd
from .coordination import random_states
from .coordination.uneven_batches import even_batches_set, join
from .models import methods, outside_autocast
from .models.checks import check_model, check_optimizer, not_for_local_sgd
from .models.unwrap import engine_of, engines_of, mark_prepared
from .settings.from_ddp_kwargs import config_with, register_hook
from .settings.layers import checkpointed_layers, with_layer_units
from .settings.plugin import ShardPlugin
from .settings.resolve import chosen_plugin, refuse_other_engines, share
from .state.mixin import StateMixin

__all__ = ["Accelerator"]

_HANDLE = "torch_shard.engine_of(accelerator.unwrap_model(model))"
_SAVING = (
    "Save accelerator.get_state_dict(model) instead, called on all ranks, and let all ranks call accelerator.wait_for_everyone() "
    "after one rank has written the file; accelerator.save_state(folder) saves optimizers, too."
)

T = TypeVar("T")

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # by mixed_precision

_SIGNATURE = inspect.signature(accelerate.Accelerator.__init__)

# The plugin with which a model was prepared, by the engine's configuration, which deep copies of the model share.
_plugins: MutableMapping[Any, ShardPlugin] = WeakIdKeyDictionary()


class Accelerator(StateMixin, accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` whose ``prepare`` shards models: parameters, gradients and optimizer state.

    It takes the arguments of Accelerate's class, and these:

    Args:
        shard_plugin: a :class:`~accelerate_shard.ShardPlugin` or a :class:`torch_shard.ShardConfig`. Without it the
            settings of the launch count, else the defaults.
        fsdp_plugin: settings for torch's FSDP, which are translated. A warning names those that have no meaning here.

    ``mixed_precision="bf16"`` and ``"fp16"`` gather the parameters that autocast casts in its dtype, unless `shard_plugin` has
    a ``precision`` of its own (``Precision()``: autocast alone).

    Raises:
        ConfigError: settings of other engines (DeepSpeed, Megatron-LM, ...), and settings that contradict each other.
    """

    def __init__(self, *args: Any, shard_plugin: ShardPlugin | ShardConfig | None = None, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        refuse_other_engines(given)
        self.shard_plugin = chosen_plugin(shard_plugin, given.pop("fsdp_plugin", None))
        given.pop("self")
        super().__init__(**given)
        share(self.shard_plugin)
        refuse_local_sgd(not_for_local_sgd)
        write_full_safetensors()

    # -- preparing ------------------------------------------------------------------------------------------------
    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, dataloaders and schedulers, in any order and number of calls, as Accelerate does.

        Collective if a model is among them. If it raises, none of the objects counts as prepared, and models that were sharded
        before the error stay sharded: prepare them again, or call ``engine.close()`` for the plain model.

        Raises:
            ConfigError: see :meth:`prepare_model` and :meth:`prepare_optimizer`; before anything has changed.
            SetupError: see :func:`torch_shard.shard`.
        """

        def check() -> None:
            for obj in args:
                if isinstance(obj, nn.Module):
                    self._check(obj)
                elif isinstance(obj, torch.optim.Optimizer):
                    check_optimizer(obj)

        if any(isinstance(obj, nn.Module) for obj in args):
            self._on_each_rank(check)
        else:
            check()
        with _lists_restored(self):
            prepared = super().prepare(*args, device_placement=device_placement)
        for model in self._models:
            if getattr(model, "_is_accelerate_prepared", False) is True:
                mark_prepared(model)
        return prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model` in place, with the forward under autocast where ``mixed_precision`` says so. Collective.

        Args:
            device_placement: ignored: shards are on ``self.device``.
            evaluation_mode: ignored: a model that is only evaluated is sharded, too.

        Raises:
            ConfigError: a model that something else has sharded or wrapped, or an Accelerator with other settings.
            SetupError: see :func:`torch_shard.shard`.
        """

        def check() -> ShardConfig | None:
            self._check(model)
            return self._config_for(compiled_inner(model)) if engine_of(model) is None else None

        with _lists_restored(self):
            config = self._on_each_rank(check)
            if config is not None:
                self._shard(compiled_inner(model), config)
            # It is not moved, for sharding did that unit by unit, and not wrapped, which is what evaluation_mode means there.
            prepared: nn.Module = super().prepare_model(model, device_placement=False, evaluation_mode=True)
        mark_prepared(prepared)
        return prepared

    def _check(self, model: nn.Module) -> None:
        check_model(model, self.device)
        engine = engine_of(model)
        if engine is None:
            return
        used = _plugins.get(engine.config)
        if used is None:
            raise ConfigError("prepare: the model is sharded already; give prepare() the plain model.")
        if used != self.shard_plugin:
            fields = [
                f.name for f in dataclasses.fields(used) if getattr(used, f.name) != getattr(self.shard_plugin, f.name)
            ]
            differences = ", ".join(f"{f}={getattr(used, f)!r}, now {getattr(self.shard_plugin, f)!r}" for f in fields)
            raise ConfigError(
                f"prepare: the model was prepared by an Accelerator with another shard_plugin ({differences}). "
                "Give both the same one."
            )

    def _on_each_rank(self, check: Callable[[], T]) -> T:
        """Run `check` on every rank; raise on all if it raises on one, for which they would wait in ``shard()``. Collective."""
        limit = self.shard_plugin.timeout
        return each_rank(check, "Accelerator.prepare", group_timeout(self.device) if limit is None else limit)

    def _config_for(self, model: nn.Module) -> ShardConfig:
        """Return the settings of `model`'s engine. Not collective."""
        config = with_layer_units(
            self.shard_plugin.config(group_timeout(self.device)), model, self.shard_plugin.layer_classes
        )
        config = config_with(self.ddp_handler, config)
        dtype = self._autocast_dtype()
        if dtype is not None:
            config = for_autocast(config, model, dtype, f"mixed_precision={self.mixed_precision!r}")
        if self.shard_plugin.fp32_masters and self.native_amp and self.mixed_precision in _DTYPES:
            precision = dataclasses.replace(precision_of(config.precision), master_dtype=torch.float32)
            config = dataclasses.replace(config, precision=precision)
        return config

    def _autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of the autocast that Accelerate puts around forwards; None if there is none or it is off."""
        off = self.autocast_handler is not None and not self.autocast_handler.enabled
        if not self.native_amp or off:
            return None
        return _DTYPES.get(self.mixed_precision)

    def _shard(self, model: nn.Module, config: ShardConfig) -> Engine:
        # One process that places nothing computes where the user has put the model.
        places = self.device_placement or self.shard_plugin.offload is not None or dist.is_initialized()
        with checkpointed_layers(model, self.shard_plugin, config):
            engine = torch_shard.shard(model, config, mesh=self.device if places else None)
        word_remedies(engine, _HANDLE, _SAVING)
        if self.device_placement:
            _place_ignored(model, self.device)
        if self._autocast_dtype() is not None and self.shard_plugin.precision is None:
            outside_autocast.register(model, precision_of(config.precision), self.device)
        register_hook(self.ddp_handler, engine)
        _plugins[engine.config] = self.shard_plugin
        methods.install(model)
        return engine

    # -- optimizers -------------------------------------------------------------------------------------------------
    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer, whose parameters may be sharded already, or be sharded later. Not collective.

        Args:
            device_placement: ignored: state is where its parameter is.

        Raises:
            ConfigError: an optimizer whose steps can't be right with sharded models.
        """
        check_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement=False)

    # -- gradients --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Accumulate gradients inside: for all micro-batches of an accumulation but the last.

        By default each micro-batch reduces its gradients, which accumulate as shards, so that no rank needs memory for full
        gradients. ``ShardPlugin(defer_gradient_sync=True)`` reduces once, as DDP does. Clipping and optimizer steps, which are
        not linear in the gradients, have to wait for the last micro-batch.

        Raises:
            ShardError: on all ranks: an optimizer step or clipping before the last micro-batch; a backward after an edit of
                ``.grad``.
        """
        engine = engine_of(model)
        if engine is None:
            with super().no_sync(model):
                yield
        else:
            with engine.no_sync(hold=self.shard_plugin.defer_gradient_sync):
                yield

    @staticmethod
    @contextlib.contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Reduce gradients in the backward inside, though its forward ran under :meth:`no_sync`."""
        engine = engine_of(model)
        if engine is None:
            # Not accelerate.Accelerator, since enable() makes that name this class.
            with super(Accelerator, Accelerator).trigger_sync_in_backward(model):
                yield
            return
        with engine.sync_in_backward():
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Scale gradients so that their norm is at most `max_norm`. Collective.

        Args:
            parameters: any of any prepared models, in any order, the same on all ranks.

        Returns:
            The norm before clipping, a 0-d tensor, equal on all ranks.

        Raises:
            ShardError: between the micro-batches of an accumulation, where DDP would clip each rank's own gradients.
        """
        _refuse_between_syncs(self, "clip_grad_norm_")
        self.unscale_gradients()
        return clip_norm(engines_of(self._models), _listed(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of the gradients to ``[-clip_value, clip_value]``. Not collective.

        Raises:
            ShardError: between the micro-batches of an accumulation, as :meth:`clip_grad_norm_`.
        """
        _refuse_between_syncs(self, "clip_grad_value_")
        self.unscale_gradients()
        limit_values(engines_of(self._models), _listed(parameters), clip_value)

    # -- batches ----------------------------------------------------------------------------------------------------
    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare a dataloader as Accelerate does. Not collective.

        Where ranks begin to iterate over it and random states are synchronized, they are compared first.

        Raises (from iterating):
            DivergenceError: at once, on all ranks: another rank is in something else that is collective, say in a forward.
        """
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        own = weakref.ref(self)

        def begin() -> None:
            accelerator = own()
            if accelerator is not None:
                accelerator._wait_for_all("the beginning of a dataloader")

        random_states.announce(prepared, begin)
        return prepared

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Evaluate inside with different numbers of batches on the ranks. Collective.

        If the ranks have different numbers of batches, models in evaluation mode are gathered on every rank. Otherwise this only
        sets `even_batches`.

        Args:
            joinables: prepared models.
            even_batches: overrides the dataloaders' own inside; on GPUs alone, as in Accelerate.

        Raises:
            ConfigError: on all ranks: a forward in training mode over a dataloader whose numbers of batches differ between the
                ranks. Other dataloaders may be trained on.
        """
        if not self.use_distributed:
            yield
            return
        # On CPUs Accelerate joins nothing and leaves batches as they are, and scripts count on that.
        override = even_batches if self.multi_device else None
        with (
            even_batches_set(self._dataloaders, override),
            join(
                [(model, engine) for model in joinables if (engine := engine_of(model)) is not None],
                self._dataloaders,
                lambda: self.gradient_state.active_dataloader,
                group_timeout(self.device),
            ),
        ):
            yield

    # -- ranks ------------------------------------------------------------------------------------------------------
    def wait_for_everyone(self) -> None:
        """Return when all ranks are here, however far apart. Collective.

        Raises:
            DivergenceError: at once, on all ranks: another rank is in something else that is collective, as in ``save_state``
                under ``if accelerator.is_main_process:``.
        """
        self._wait_for_all("Accelerator.wait_for_everyone")
        super().wait_for_everyone()

    def _wait_for_all(self, what: str) -> None:
        """Return when all ranks are in `what`, with an error that tells a rank what the others wait for. Collective.

        In a barrier of torch's alone, rank 0 that calls ``save_state`` under ``if accelerator.is_main_process:`` and the other
        ranks in the barrier behind it would wait for each other until the process group's timeout. Without a sharded model this
        does nothing.
        """
        engines = engines_of(self._models)
        if engines:
            wait_for_all(engines[0], group_timeout(self.device), what)


@contextlib.contextmanager
def _lists_restored(accelerator: Accelerator) -> Iterator[None]:
    """Take what was prepared inside off the Accelerator's lists if it raises."""
    before = {name: list(getattr(accelerator, name)) for name in PREPARED_LISTS}
    try:
        yield
    except BaseException:
        for name, entries in before.items():
            getattr(accelerator, name)[:] = entries
        raise


@torch.no_grad()
def _place_ignored(model: nn.Module, device: torch.device) -> None:
    """Move parameters that are not sharded (``ShardPlugin.ignore``) from the CPU to `device`, in the same objects."""
    for p in model.parameters():
        if not isinstance(p, ShardTensor) and p.device.type == "cpu" != device.type:
            p.data = p.data.to(device)
            if p.grad is not None:
                p.grad = p.grad.to(device)


def _refuse_between_syncs(accelerator: Any, name: str) -> None:
    """Refuse to clip between the micro-batches of an accumulation, where each rank of DDP clips gradients of its own.

    Raises:
        ShardError: on all ranks, before anything has changed.
    """
    state = accelerator.gradient_state
    # With sync_each_batch gradients are the mean over the ranks under DDP, too.
    if accelerator.num_processes == 1 or state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False):
        return
    raise ShardError(
        f"accelerator.{name} was called while accelerator.sync_gradients is False. DistributedDataParallel clips each rank's own "
        "gradients then; sharded gradients are the mean over the ranks already, so that other numbers would come out. Clip under "
        "`if accelerator.sync_gradients:`, or reduce gradients in each micro-batch with "
        "GradientAccumulationPlugin(sync_each_batch=True)."
    )


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
