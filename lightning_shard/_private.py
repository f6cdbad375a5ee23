"""Everything of Lightning that its documentation does not promise, in one place.

The strategy takes these from here and nothing from Lightning's underscored names elsewhere; when a new Lightning breaks
something, this is the file to look at. Tested with :data:`TESTED` of each of the two distributions.

Attributes of Lightning's own objects that the strategy reads or writes, and why:

- ``Strategy._lightning_module``, ``_optimizers``, ``_launcher``, ``_precision_plugin``: set by the base class;
- ``Strategy._checkpoint_io``: what the user gave, or None; a wrapping plugin takes a base from us in its property
  ``checkpoint_io`` unless it has one;
- ``ModelCheckpoint.file_exists``: shadowed in the instance during a run that saves in the background;
- ``StochasticWeightAveraging._average_model``, ``WeightAveraging._average_model``: the copies that they average in (see
  :func:`average_of`);
- ``LightningModule._trainer``: None where there is no Trainer;
- ``__class__`` of a precision plugin: becomes a subclass of the plugin's own class, which clips through the engine;
- ``Strategy._layer_sync``: where the Trainer leaves the plugin of ``sync_batchnorm=True``;
- ``Trainer.fit`` passes ``weights_only`` to the launcher, by that name (see :func:`asked_weights_only`);
- ``Strategy._precision``, ``_backward_sync_control`` of Fabric: the base class's, the latter read by ``no_backward_sync``;
- ``_FabricModule`` calls a marked method by shadowing ``forward`` of the module with a function ``wrapped_forward``
  (see :func:`is_redirected`), and only where the strategy's module is another object than the user's;
- ``Trainer.fit_loop._should_accumulate`` and ``fit_loop.epoch_loop._batches_that_stepped``: as the built-in monitors read them
  (see :func:`accumulates` and :func:`logged_step`);
- ``Trainer._evaluation_loop.batch_progress`` and ``Trainer.predict_loop.batch_progress`` (see :func:`is_last_to_evaluate`);
- ``TensorBoardLogger._log_graph`` and ``.log_graph``: read, and shadowed in the instance during a run (see :func:`traces_graph`);
- ``LightningModule.forward`` may be shadowed in the instance for the time of one call (as Lightning's own redirection
  for DDP does).
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

TESTED = ("2.6.6",)

# Mixins of strategies have no base of their own: they stand before a class of Lightning's, of either namespace.
if TYPE_CHECKING:
    MixinBase: TypeAlias = Any
else:
    MixinBase = object

# Lightning's names, without the underscore, and the place of each: in the strategy's own package (the Trainer's or Fabric's), or
# in Fabric's beside it.
_OF_BOTH = {
    "MisconfigurationException": "{own}.utilities.exceptions:MisconfigurationException",
    "MixedPrecision": "{own}.plugins.precision:MixedPrecision",
    "MultiProcessingLauncher": "{own}.strategies.launchers:_MultiProcessingLauncher",
    "Precision": "{own}.plugins.precision:Precision",
    "SubprocessScriptLauncher": "{own}.strategies.launchers:_SubprocessScriptLauncher",
    "TorchCheckpointIO": "{own}.plugins.io:TorchCheckpointIO",
    "default_backend_for_device": "{fabric}.utilities.distributed:_get_default_process_group_backend_for_device",
    "default_pg_timeout": "{fabric}.plugins.collectives.torch_collective:default_pg_timeout",
    "init_dist_connection": "{fabric}.utilities.distributed:_init_dist_connection",
    "sync_ddp_if_available": "{fabric}.utilities.distributed:_sync_ddp_if_available",
    "version": "{own}:__version__",
}
_OF_TRAINER = {
    "LightningEnvironment": "{fabric}.plugins.environments:LightningEnvironment",
    "LightningOptimizer": "{own}.core.optimizer:LightningOptimizer",
    "ModelCheckpoint": "{own}.callbacks:ModelCheckpoint",
    "ModelPruning": "{own}.callbacks:ModelPruning",
    "SIGTERMException": "{own}.utilities.exceptions:SIGTERMException",
    "StochasticWeightAveraging": "{own}.callbacks:StochasticWeightAveraging",
    "TrainerFn": "{own}.trainer.states:TrainerFn",
    "WeightAveraging": "{own}.callbacks:WeightAveraging",
    "WrappingCheckpointIO": "{own}.plugins.io.wrapper:_WrappingCheckpointIO",
    "optimizers_to_device": "{fabric}.utilities.optimizer:_optimizers_to_device",
    "reset_seed": "{fabric}.utilities.seed:reset_seed",
    "update_properties": "{fabric}.utilities.device_dtype_mixin:_update_properties",
}
_REFUSED_PRECISION = (
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "FSDPPrecision",
    "TransformerEnginePrecision",
    "XLAPrecision",
)


class Private(types.SimpleNamespace):
    """The objects of one namespace of Lightning that a strategy uses: those of the tables above, and some derived ones."""

    def __init__(self, names: Mapping[str, str], own: str, fabric: str) -> None:
        found = {name: pkgutil.resolve_name(path.format(own=own, fabric=fabric)) for name, path in names.items()}
        super().__init__(**found)
        self.refused_precision = tuple(
            pkgutil.resolve_name(f"{own}.plugins.precision:{name}") for name in _REFUSED_PRECISION
        )
        # Lightning keeps the rank in each of these; `rank_zero_info` and the loggers read them.
        places = (f"{own}.utilities.rank_zero", "lightning_utilities.core.rank_zero")
        self.rank_zero_only = tuple(pkgutil.resolve_name(f"{place}:rank_zero_only") for place in places)


@functools.cache
def private(namespace: str) -> Private:
    """Import and return what the Trainer's strategy uses of ``"lightning"`` or ``"pytorch_lightning"``."""
    own, fabric = {
        "lightning": ("lightning.pytorch", "lightning.fabric"),
        "pytorch_lightning": ("pytorch_lightning", "lightning_fabric"),
    }[namespace]
    return Private({**_OF_BOTH, **_OF_TRAINER}, own, fabric)


@functools.cache
def fabric_private(package: str) -> Private:
    """Import and return what Fabric's strategy uses of ``"lightning.fabric"`` or ``"lightning_fabric"``."""
    found = Private(_OF_BOTH, package, package)
    found.WrappingCheckpointIO = ()  # Fabric has no plugins around others
    return found


def asked_weights_only(function: Callable[..., Any], args: Any, kwargs: Any) -> bool | None:
    """Return the ``weights_only`` that the user gave to ``fit``, ``validate``, ``test`` or ``predict``.

    The Trainer hands it only to the first checkpoint that a run reads, so the launcher takes it from the call.
    """
    try:
        return inspect.signature(function).bind_partial(*args, **kwargs).arguments.get("weights_only")
    except (TypeError, ValueError):
        return None


# The Trainer registers ``_signal_connector._slurm_sigusr_handler_fn`` when a run has been set up, and unregisters only its own
# handlers. So an attribute of the instance shadows the method before that, and the method is called through the class.
_REQUEUE_HANDLER = "_slurm_sigusr_handler_fn"


def requeue_signal_of(environment: Any) -> Any:
    """Return the signal at which a job of SLURM saves and requeues itself, or None where it does not."""
    return environment.requeue_signal if getattr(environment, "auto_requeue", False) else None


def shadow_requeue_handler(trainer: Any, handler: Callable[[int, Any], None]) -> None:
    """Make the next run call `handler` in place of the Trainer's own."""
    vars(trainer._signal_connector)[_REQUEUE_HANDLER] = handler


def restore_requeue_handler(trainer: Any) -> None:
    """Undo :func:`shadow_requeue_handler`."""
    vars(trainer._signal_connector).pop(_REQUEUE_HANDLER, None)


def call_requeue_handler(trainer: Any, signum: int) -> None:
    """Save a checkpoint where the next job looks for it (collective), and requeue the job from rank 0."""
    connector = trainer._signal_connector
    getattr(type(connector), _REQUEUE_HANDLER)(connector, signum, None)


# The handler of SIGTERM is shadowed in the same way, and the loop's check before each batch of training, which sends rank 0's
# answer to the other ranks.
_SIGTERM_HANDLER, _SIGTERM_CHECK = "_sigterm_notifier_fn", "_broadcast_sigterm_tensor"


def shadow_sigterm_handling(trainer: Any, handler: Callable[[int, Any], None], check: Callable[[], None]) -> None:
    """Make the next run call `handler` in place of the Trainer's own, and `check` before each batch of training."""
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    # A Lightning without both handles SIGTERM in another way.
    if hasattr(connector, _SIGTERM_HANDLER) and hasattr(loop, _SIGTERM_CHECK):
        vars(connector)[_SIGTERM_HANDLER], vars(loop)[_SIGTERM_CHECK] = handler, check


def restore_sigterm_handling(trainer: Any) -> None:
    """Undo :func:`shadow_sigterm_handling`."""
    vars(trainer._signal_connector).pop(_SIGTERM_HANDLER, None)
    vars(trainer.fit_loop.epoch_loop).pop(_SIGTERM_CHECK, None)


def set_received_sigterm(trainer: Any) -> None:
    """Make the loops end after the batch that runs, with a SIGTERMException."""
    trainer._signal_connector.received_sigterm = True


def traces_graph(logger: Any) -> bool:
    """Return True for a logger that traces the model on rank 0 in ``log_graph``, as TensorBoardLogger does if asked to."""
    return bool(getattr(logger, "_log_graph", False))


def average_of(callback: Any, private: Private) -> nn.Module | None:
    """Return the deep copy of the module in which a callback keeps its average; None if it keeps none, or none yet."""
    if not isinstance(callback, (private.StochasticWeightAveraging, private.WeightAveraging)):
        return None
    held: nn.Module | None = callback._average_model
    if held is not None and isinstance(callback, private.WeightAveraging):
        return held.get_submodule("module")  # it is a torch.optim.swa_utils.AveragedModel
    return held


def run_as_forward(module: nn.Module, name: str, args: Any, kwargs: Any) -> Any:
    """Call ``module.<name>(*args, **kwargs)`` inside the module's own forward hooks.

    The engine then sees ``training_step`` and its like as one forward of the root: the root's own parameters are full
    in it, and buffers are synchronised once per step, as under DDP.
    """
    shadowed = "forward" in module.__dict__
    forward = module.forward

    def redirected(*args: Any, **kwargs: Any) -> Any:
        restore()  # first, since the step itself will want to call the real forward
        return getattr(module, name)(*args, **kwargs)

    def restore() -> None:
        if shadowed:
            module.__dict__["forward"] = forward
        else:
            module.__dict__.pop("forward", None)

    module.__dict__["forward"] = redirected
    try:
        # Not module(...): that would run a module.compile()d forward, and compile the whole step in its place.
        return nn.Module._call_impl(module, *args, **kwargs)
    finally:
        if module.__dict__.get("forward") is redirected:
            restore()


def is_redirected(module: nn.Module) -> bool:
    """Return True if the next call of ``forward`` is one of a method marked with Fabric's ``mark_forward_method``."""
    return getattr(module.__dict__.get("forward"), "__name__", "") == "wrapped_forward"


def is_last_to_evaluate(trainer: Any) -> bool:
    """Return True if this rank has no batch after the one that it evaluates or predicts now.

    The answer is False in a step that takes a ``dataloader_iter``, where Lightning does not know.
    """
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    return bool(loop.batch_progress.is_last_batch)


def accumulates(trainer: Any) -> bool:
    """Return True if the step of the micro-batch that runs, or has just run, ends with a later one."""
    return bool(trainer.fit_loop._should_accumulate())


def logged_step(trainer: Any) -> int:
    """Return the number under which Lightning logs what belongs to the running step."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def logs_this_step(trainer: Any) -> bool:
    """Return True if ``log_every_n_steps`` chooses the running step.

    The answer is the same on all ranks. Lightning's own is True also on a rank that was asked to stop.
    """
    every = trainer.log_every_n_steps
    return bool(every) and (logged_step(trainer) + 1) % every == 0
