"""The Trainer's strategy for both namespaces: a mixin that the concrete classes put before ParallelStrategy.

Methods stand in the order in which the Trainer calls them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import torch_shard
from torch_shard import Engine, ShardConfig
from torch_shard.activation_checkpointing import checkpointed_layers, keep_activations
from torch_shard.errors import UnitStateError
from torch_shard.frontend import explained_step, own_buffers, word_remedies
from torch_shard.log import logger

from .._private import Private, run_as_forward
from ..checkpoint.full import is_sharded
from ..checkpoint.strategy_mixin import CheckpointMixin
from ..strategy import precision as _precision
from ..strategy.metric_states import move_states
from ..strategy.processes import ProcessesMixin
from ..strategy.settings import SettingsMixin, same_config
from ..strategy.signature import show_settings
from . import weight_averaging as averaging
from .barriers import BarrierMixin
from .clipping import with_sharded_clipping
from .graph import gather_to_trace, leave_tracing
from .memory import fits_on_every_rank
from .one_run import enter_run, leave_run
from .requeue import RequeueMixin
from .sigterm import SigtermMixin
from .uneven_batches import EvaluationMixin

_HANDLE = "trainer.strategy.engine"
_SAVING = (
    "Save trainer.strategy.engine.state_dict() instead, and for optimizers trainer.strategy.engine.optim_state_dict(optimizer), "
    "called on all ranks, and let all ranks call trainer.strategy.barrier() after one rank has written the file; "
    "trainer.save_checkpoint(path) saves both."
)


class TrainerStrategyMixin(
    EvaluationMixin, CheckpointMixin, RequeueMixin, SigtermMixin, BarrierMixin, ProcessesMixin, SettingsMixin
):
    """Trains with parameters, gradients and optimizer state sharded over the ranks; otherwise as DDP does.

    Args:
        config: the settings of sharding; keyword arguments that are fields of :class:`~torch_shard.ShardConfig` change it on top,
            as in ``ShardStrategy(strategy="shard_grad_op", prefetch=2)``.
        accelerator: the accelerator, which the Trainer normally gives.
        parallel_devices: the devices of this node's ranks, which the Trainer normally gives.
        cluster_environment: the cluster's environment, which the Trainer normally gives.
        checkpoint_io: the plugin that reads and writes files, which the Trainer normally gives.
        precision_plugin: the precision plugin, which the Trainer normally gives. With ``bf16-mixed`` and ``16-mixed``
            parameters that autocast casts are gathered in its dtype, unless `config` has a ``precision`` of its own
            (``Precision()``: autocast alone).
        unshard_at_end: give the full, plain module (and optimizer state) back on every rank when a run ends, as DDP
            does. By default where it fits in memory; else the module stays sharded and the log says so. After a run that gave it
            back ``trainer.save_checkpoint`` writes one file, whatever ``state_dict_type`` is.
        **settings: the fields of :class:`~lightning_shard.strategy.settings.StrategySettings` and of ``ShardConfig``.

    Raises:
        ConfigError: a setting is unknown or has a bad value.
    """

    model: Any
    _private: Private

    def __init__(
        self,
        config: ShardConfig | None = None,
        *,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        unshard_at_end: bool | None = None,
        **settings: Any,
    ) -> None:
        self._keep_settings(config, settings)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self._unshard_at_end = unshard_at_end
        self._pending = self._pending_occasion = None
        self._shared = Counter()
        self._files_given = 0
        self._removals, self._shown_to = [], []
        self._weights_only_asked: bool | None = None  # by the running fit, validate, test or predict
        self._layers_synced = False
        self._prepared = False
        self._failed = False

    # -- Trainer(): what the connector sets and asks ------------------------------------------------------------------
    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which clips gradients through the engine."""
        return self._precision_plugin if self._precision_plugin is not None else self._private.Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            _precision.check(plugin, self._private)
            plugin = with_sharded_clipping(plugin, self)
        self._precision_plugin = plugin

    def _join_group(self) -> None:
        self._private.reset_seed()
        self._prepared = False
        super()._join_group()

    # -- a run begins -------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Create tensors of ``configure_model`` and ``Trainer.init_module`` on the CPU; with `empty_init` on the meta device."""
        # Neither moves to the device here: sharding does that unit by unit.
        meta = torch.device("meta") if empty_init else contextlib.nullcontext()
        with meta, self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Any) -> None:
        """Shard the model and, for ``fit``, configure the optimizers over the sharded parameters. Collective."""
        if not self._prepared:  # else a checkpoint has been loaded into it
            self._prepare(trainer)
        if trainer.state.fn == self._private.TrainerFn.FITTING:
            # Only then: the optimizers of an earlier fit stay through validate, test and predict.
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.engine.attach(self._unwrapped(optimizer))
        self.setup_precision_plugin()
        self._show_pending(trainer.callbacks)
        gather_to_trace(trainer.loggers, self)

    def _prepare(self, trainer: Any) -> None:
        """Shard the model and its averages. Collective."""
        assert self.accelerator is not None
        assert self.model is not None
        self._failed = False
        self.accelerator.setup(trainer)
        enter_run(self.lightning_module, self)
        self._defer_requeue(trainer)
        self._defer_sigterm(trainer)
        averaging.check(trainer.callbacks, self.model, self._private)
        fitting = trainer.state.fn == self._private.TrainerFn.FITTING
        config = self._engine_config(self.precision_plugin, self.model)
        engine = self._reusable_engine(fitting, config)
        if engine is None and config.strategy == "auto" and not fitting:  # which plans a step of training
            config = dataclasses.replace(config, strategy="full_shard", memory=None)
        if engine is None or not engine.recomputes:
            keep_activations(self.model)  # an earlier run may have chosen others
        with checkpointed_layers(self.model, self._checkpointed, config.units, self._offloaded):
            if engine is None:
                self._shard(config, fitting)
        word_remedies(self.engine, _HANDLE, _SAVING)
        self.model_to_device()
        averaging.shard(trainer.callbacks, self.engine, self._private)
        self._prepared = True

    def _shard(self, config: ShardConfig, fitting: bool) -> None:
        assert self.model is not None
        if fitting and self._layer_sync is not None:
            self.model = self._layer_sync.apply(self.model)
            self._layers_synced = True
        # Before sharding: afterwards the dtype of a parameter is fixed.
        self.model = self.precision_plugin.convert_module(self.model)
        torch_shard.shard(self.model, config, mesh=self.root_device)

    def _reusable_engine(self, fitting: bool, config: ShardConfig) -> Engine | None:
        """Return the engine that an earlier run left on this model; close it if it does not fit this run."""
        assert self.model is not None
        engine = torch_shard.engine_of(self.model)
        if engine is None:
            return None
        wants_sync = fitting and self._layer_sync is not None and not self._layers_synced
        if same_config(engine.config, config) and engine.device == self.root_device and not wants_sync:
            return engine
        engine.close()
        return None

    def model_to_device(self) -> None:
        """Move what is neither parameter nor buffer, such as the state of metrics; the engine has moved the rest."""
        assert self.lightning_module is not None
        # Never Module.to(): it would replace the parameters one by one.
        self._private.update_properties(self.lightning_module, device=self.root_device)
        move_states(self.lightning_module, self.root_device)

    # -- steps --------------------------------------------------------------------------------------------------------
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``LightningModule.training_step``, under automatic optimization as a forward of the module."""
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            if not self.lightning_module.automatic_optimization:
                # Its forwards must use what its optimizer steps change, which is not possible within one forward. Buffers are
                # not sent: under Lightning's DDP this step does not count as a forward whose backward reduces.
                with own_buffers(self.engine):
                    return self.lightning_module.training_step(*args, **kwargs)
            return run_as_forward(self.lightning_module, "training_step", args, kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``LightningModule.validation_step`` as a forward of the module."""
        with self._evaluating("validation"), self.precision_plugin.val_step_context():
            return run_as_forward(self.lightning_module, "validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``LightningModule.test_step`` as a forward of the module."""
        with self._evaluating("test"), self.precision_plugin.test_step_context():
            return run_as_forward(self.lightning_module, "test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``LightningModule.predict_step`` as a forward of the module."""
        with self._evaluating("predict"), self.precision_plugin.predict_step_context():
            return run_as_forward(self.lightning_module, "predict_step", args, kwargs)

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step as Lightning does; an error that memory has run out says what holds it."""
        with explained_step(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients in all micro-batches of a step except the last.

        By default each micro-batch reduces, and gradients accumulate in shards. ``defer_gradient_sync=True`` reduces once, as DDP
        does, and holds full gradients.
        """
        engine = self.engine_or_none
        with contextlib.nullcontext() if engine is None else engine.no_sync(hold=self._settings.defer_gradient_sync):
            yield

    # -- a run ends ---------------------------------------------------------------------------------------------------
    def on_exception(self, exception: BaseException) -> None:
        """Note that the run has failed: the other ranks may be anywhere, so teardown must not wait for them."""
        self._failed = True
        self._give_exit_status(exception)

    def teardown(self) -> None:
        """Give the module and its optimizers back as DDP does: plain, full and on the CPU. Collective.

        They stay sharded after an exception, with ``unshard_at_end=False``, and if they would not fit in memory.
        """
        with self._cleaning_up():
            self._release_full()
        self._end_requeue()  # first: it may save, and what it needs is still there
        self._restore_sigterm()
        self._hide_pending()
        leave_tracing(self._of_trainer("loggers"))
        self._prepared = False
        leave_run(self.lightning_module, self)
        unsaved = self._finish_saves_at_end()
        engine = self.engine_or_none
        if engine is not None and not self._failed and self._wants_plain():
            self._unshard(engine)
        if self.engine_or_none is None:
            with self._cleaning_up():
                self._revert_layers()
            with self._cleaning_up():
                self._private.optimizers_to_device(self.optimizers, torch.device("cpu"))
            with self._cleaning_up():
                if self.lightning_module is not None:
                    keep_activations(self.lightning_module)
                    self.lightning_module.cpu()
        # Not super().teardown(): it moves parameters off their device whatever they are.
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator):
            with self._cleaning_up():
                assert part is not None
                part.teardown()
        with self._cleaning_up():
            if unsaved is not None:
                raise unsaved

    @contextlib.contextmanager
    def _cleaning_up(self) -> Iterator[None]:
        """Log a failure inside if the run has failed already.

        Set-up may have left parameters without memory, or only some of them sharded, which can't be moved. That must not hide
        why the run failed.
        """
        try:
            yield
        except Exception as error:
            if not self._failed:
                raise
            logger.warning("a part of the failed run's teardown failed, too: %s: %s", type(error).__name__, error)

    def _revert_layers(self) -> None:
        if self._layers_synced and self._layer_sync is not None and self.model is not None:
            self._layers_synced = False
            self.model = self._layer_sync.revert(self.model)

    def _wants_plain(self) -> bool:
        if self._settings.start_method != "popen":
            # Processes end with the run, and the module is sent to the parent as plain tensors.
            return True
        if self._unshard_at_end is not None:
            return self._unshard_at_end
        averages = averaging.parameters(self._of_trainer("callbacks"), self._private)
        if fits_on_every_rank(self, self.optimizers, averages):
            return True
        logger.warning(
            "the model stays sharded after this run: full copies of it and its optimizer state on every rank would "
            "not fit in memory. engine_of(model).state_dict() gathers it on rank 0; unshard_at_end=True or False "
            "decides."
        )
        return False

    def _unshard(self, engine: Engine) -> None:
        optimizers = [self._unwrapped(optimizer) for optimizer in self.optimizers]
        try:
            engine.close(*filter(is_sharded, optimizers))
            averaging.unshard(self._of_trainer("callbacks"), engine.model, self._private, engine.device)
        except UnitStateError as error:
            logger.warning("the model stays sharded after this run: %s", error)

    def _unwrapped(self, optimizer: Any) -> Any:
        return optimizer.optimizer if isinstance(optimizer, self._private.LightningOptimizer) else optimizer

    # -- for users ----------------------------------------------------------------------------------------------------
    @property
    def engine(self) -> Engine:
        """The engine of the module in the run, for ``trainer.strategy.engine.gathered(...)`` and the like.

        Raises:
            RuntimeError: nothing is sharded now. There is an engine from ``on_fit_start`` to the end of the run.
        """
        engine = self.engine_or_none
        if engine is None:
            raise RuntimeError(
                "trainer.strategy.engine: no module is sharded now; there is an engine from the end of set-up "
                "(on_fit_start, on_train_start, ...) until the run ends."
            )
        return engine

    @property
    def engine_or_none(self) -> Engine | None:
        """The engine of the module in the run, or None if nothing is sharded."""
        module = self._lightning_module
        return torch_shard.engine_of(module) if module is not None else None


show_settings(TrainerStrategyMixin)
