"""The public handle of a sharded model."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import autograd_bridge, clip, comm_hook, restore, setup
from . import gathered as _gathered
from .config import ShardConfig
from .engine_state import EngineState
from .engine_statistics import EngineStatistics
from .errors import ConfigError, ShardError
from .hooks import unregister
from .optim_step import StepWatch
from .plan import Plan
from .runtime import Runtime
from .unit import Unit

_ATTRIBUTE = "_torch_shard_engine"


class Engine(EngineState, EngineStatistics):
    """What :func:`shard` returns: the model stays a plain module, everything else is reached from here.

    Properties are not collective. A collective method must be called on all ranks of the mesh, in the same order; a
    rank that does not come within ``ShardConfig.timeout`` seconds is a
    :class:`~torch_shard.errors.MissingRankError` on those that wait.

    Attributes:
        plan: the :class:`~torch_shard.plan.Plan` in use; ``print(engine.plan.table())``.
        config: the :class:`~torch_shard.config.ShardConfig` in use.
    """

    def __init__(self, model: nn.Module, runtime: Runtime, plan: Plan, config: ShardConfig) -> None:
        self._model = weakref.ref(model)
        self._runtime = runtime
        self.plan = plan
        self.config = config
        self._watch = StepWatch(runtime)
        autograd_bridge.install(runtime)

    # -- what it is ---------------------------------------------------------------------------------------------
    @property
    def model(self) -> nn.Module:
        """The sharded module, the same object that was given to :func:`shard`."""
        model = self._model()
        if model is None:
            raise ShardError(
                "the sharded model is gone: the engine does not keep it, so hold a reference to it yourself."
            )
        return model

    @property
    def units(self) -> list[Unit]:
        """The units, in the plan's order."""
        return self._runtime.units

    @property
    def rank(self) -> int:
        """This rank within the mesh."""
        return self._runtime.collectives.world_rank

    @property
    def world_size(self) -> int:
        """Ranks of the mesh, of its tensor-parallel dimension too."""
        return self._runtime.collectives.world

    @property
    def device(self) -> torch.device:
        """Where this rank's shards live."""
        return self._runtime.collectives.device

    @property
    def shard_group(self) -> Any:
        """The process group over the ranks that share this one's copy of the parameters, which reduces gradients: for the state
        of a communication hook. None with one rank. Under ``no_shard``, and with ``shard_size=1``, it is the group over all
        ranks, with tensor parallelism over the plane: the ranks that compute with the same parts of the parameters."""
        channel = self._runtime.collectives.reduce_channel
        return None if channel is None else channel.group

    # -- training -----------------------------------------------------------------------------------------------
    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward reduces gradients; :meth:`no_sync` switches it off. Set it equally on all ranks."""
        return self._runtime.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._runtime.require_sync = value

    @contextlib.contextmanager
    def no_sync(self, hold: bool = True) -> Iterator[None]:
        """Accumulate whole gradients on this rank; the first backward outside reduces their sum.

        Saves the reductions of all micro-batches but one, at the price of one unsharded gradient (4 bytes a parameter
        in fp32). Without it each backward reduces, and `.grad` accumulates the sharded results. Until that backward
        `.grad` shows this rank's own slice of its own gradient: setting it to None or to zero drops what was
        accumulated, clipping and :meth:`gathered` with `grads` refuse it.

        Put forward and backward inside. Not collective, but all ranks must use it alike.

        Args:
            hold: False reduces in each backward inside, too, and refuses no less than True what would come out otherwise than
                with gradients that are held: clipping, and steps. For code that is written for DistributedDataParallel.

        Raises:
            ShardError: by the next backward, where a gradient was edited in between.
        """
        runtime = self._runtime
        before = runtime.require_sync, runtime.reduces_each
        runtime.require_sync, runtime.reduces_each = False, not hold
        try:
            yield
        finally:
            runtime.require_sync, runtime.reduces_each = before

    @contextlib.contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """The backward inside reduces gradients, and with them what was accumulated, though its forward ran under
        :meth:`no_sync`. For several forwards with a backward each afterwards. Not collective, but all ranks must use it alike.
        """
        runtime = self._runtime
        before = runtime.require_sync, runtime.forward_sync
        runtime.require_sync = runtime.forward_sync = True
        try:
            yield
        finally:
            runtime.require_sync, runtime.forward_sync = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Have `hook` reduce gradients in place of the engine, from the next backward on. Collective.

        It is called during backward with each unit's gradients of this rank, in one order on all ranks (once for each dtype in
        the unit): as ``hook(state, grad, output)`` where parameters are sharded, which must fill `output`, this rank's
        slice of the mean; under ``no_shard``, and with ``shard_size=1``, as ``hook(state, grad)``, which must make `grad` the
        mean. Both are 1-D, of the dtype of the reduction (``ShardConfig.precision``), and not divided by anything; gaps between
        parameters are zero. The signatures are those of torch's FullyShardedDataParallel, whose hooks run unchanged (those that
        compress need a GPU).
        Every rank calls it for the same units, with zeros where it has no gradient. A hook brings its own process group and its
        own timeouts; :attr:`bytes_sent` does not count what it sends. Under the hybrid strategies it reduces over
        :attr:`shard_group`, and the engine then averages its results over the copies. With one rank it is not called. What it
        raises is raised at the end of the backward on all ranks, provided that it does not leave the others waiting in a
        collective of its own.

        Args:
            state: given to each call: compression errors, a process group.
            hook: the function, the same on all ranks.

        Raises:
            ConfigError: it can't be called, differs between the ranks, or there is one already.
            UnitStateError: gradients wait for their reduction (:meth:`no_sync`).
            ShardError: by a backward in which it left a gradient of another size, or raised on another rank.
        """
        comm_hook.register(self._runtime, state, hook)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        parameters: Iterable[torch.Tensor] | None = None,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients so that their global norm is at most `max_norm`. Collective.

        Args:
            max_norm: the limit.
            norm_type: any p, ``inf`` and 0 included.
            parameters: a subset of the model's parameters, the same on all ranks; all by default.
            error_if_nonfinite: wait for the norm and raise where it is NaN or infinite.

        Returns:
            The norm before clipping, a 0-d tensor on the mesh's device, equal on all ranks, in the gradients'
            (promoted) dtype. Parameters that are not sharded count with rank 0's gradients.

        Raises:
            NonFiniteError: on all ranks, before anything has changed.
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`.
        """
        chosen = _listed(parameters)
        return clip.clip_grad_norm_(self._runtime, chosen, max_norm, norm_type, error_if_nonfinite, self._ignored())

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Limit each element of the gradients to ``[-clip_value, clip_value]``. Not collective.

        Raises:
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`.
        """
        clip.clip_grad_value_(self._runtime, _listed(parameters), clip_value, self._ignored())

    def _ignored(self) -> list[torch.Tensor]:
        """The parameters that are not sharded, as far as they are still there."""
        found: list[torch.Tensor] = []
        for name in self.plan.ignored:
            with contextlib.suppress(AttributeError):
                found.append(self.model.get_parameter(name))
        return found

    # -- optimizers -----------------------------------------------------------------------------------------------
    def attach(self, optimizer: Any) -> None:
        """Have the engine see the steps of an optimizer that torch's step hooks don't see. Not collective.

        They see every ``torch.optim.Optimizer`` whose ``__init__`` has run, so that only optimizers which skip that, or are of
        another class altogether, need this. It replaces the object's ``step``.

        Args:
            optimizer: an object with ``param_groups``, ``state`` and ``step``. Where it holds parameters of several sharded
                models, one of their engines is enough.

        Raises:
            ConfigError: it has none of those.
        """
        self._watch.attach(optimizer)

    def step_in_backward(self, optimizer: Any) -> None:
        """Have `optimizer` step during every backward from now on: each unit as soon as its gradients are reduced.

        Gradients are freed at once, so that a rank holds those of two units at most; in exchange, every backward is a step.
        A unit that backward needs once more behind its gradients (of a weight used detached, earlier) is stepped at the end.
        ``optimizer.step()`` may stay where it is: it finds no gradients but those of parameters that are not the engine's.
        The user's step hooks are not called; hooks on accumulated gradients are, before the step, but not at one moment on
        all ranks, so that they must not communicate (`p.grad.norm()` does). Learning rates count as they are when backward
        runs. If the ranks turn out to have done different things, some units have been updated already. With offload it is the
        host thread that steps, and backward goes on: whoever reads parameters or state waits, and what fails there is raised then
        (HostStepError). Call on all ranks; not collective.

        Args:
            optimizer: of an element-wise class (:mod:`torch_shard.optim`); None ends it.

        Raises:
            ConfigError: an optimizer of another kind, one that lists a parameter twice, or one that holds parameters of another
                sharded model; the last of these by a backward, too, where they were added later.
            ShardError: one that is not torch.optim's own, with ``Offload(nvme=...)``; by a backward that computes with a unit
                once more after its step (a weight in two checkpoints with ``use_reentrant=True``), on all ranks, when some units
                have been stepped; by the next backward, under :meth:`no_sync` or with ``torch.amp.GradScaler``; and by
                :meth:`clip_grad_norm_`, :meth:`clip_grad_value_` and ``torch.nn.utils``' functions of these names.
        """
        self._watch.step_in_backward(optimizer)

    # -- whole parameters ---------------------------------------------------------------------------------------
    def gathered(
        self,
        target: Any = None,
        *,
        write: bool = False,
        ranks: int | Iterable[int] | None = None,
        device: torch.device | str | None = None,
        grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, the modules hold whole, plain parameters. Collective, on entering and on leaving.

        Args:
            target: a module, a parameter, or several; everything by default. Whole units are gathered.
            write: keep what is changed inside. With `ranks`, the lowest of them decides for all. An exception inside
                writes nothing, on any rank.
            ranks: which ranks get the values (all by default); the others only take part.
            device: put the values there, for example ``"cpu"``; the mesh's device by default.
            grads: `.grad` of the whole parameters holds the whole gradients; with `write` they are kept too.

        A backward inside is reduced as usual, but only without `ranks`, `device` and `grads`, and of units that are computed with
        in the dtype that they are stored in: under ``ShardConfig.precision`` the values are those of storage, and a forward
        inside computes in that dtype, to which its inputs are cast.

        Raises:
            ConfigError: an argument is wrong.
            UnitStateError: inside a forward of one of the units, or nested in a call with other `ranks` or `device`.
            ReplacedParameterError: a module holds another parameter than when it was sharded.
            ShardError: with `write`, a parameter got another shape or dtype or was replaced; with `grads`, the
                gradients are not reduced yet (:meth:`no_sync`).
        """
        return _gathered.gathered(self._runtime, target, write=write, ranks=ranks, device=device, grads=grads)

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        """``model.apply(fn)`` on gathered parameters; changes are kept. Collective.

        `fn` runs on every rank, with the generators of that rank. Raises as :meth:`gathered` does.
        """
        _gathered.apply(self.model, self._runtime, fn)

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self, *optimizers: torch.optim.Optimizer) -> None:
        """Give the plain model back: whole parameters in the same objects, no hooks of the engine. Collective.

        Gradients become whole too, and the state that the `optimizers` that are named have of this model; the user's own hooks
        stay. The state of an optimizer that is not named stays cut, or with the ranks that own the parameters: it can go on on
        another engine, but not on the plain model. Needs memory for the whole model on every rank.

        Raises:
            UnitStateError: inside a forward or :meth:`gathered`, or where a graph or a weak reference still holds a
                parameter; nothing has changed then.
            CheckpointError: an asynchronous :meth:`save` has failed; nothing has changed, and the next call closes.
        """
        if self._staging is not None:  # there were asynchronous saves, on all ranks
            from .checkpoint.phases import each

            each(self._runtime, "engine.close", self.finish_saving)
        units = list(self.units)
        restore.close_units(self._runtime, optimizers, self.model)
        self._let_go(units)  # last: a close that is refused must leave the hooks
        self._runtime.collectives.close()
        self._staging = None

    def _abandon(self) -> None:
        """Leave the model as it is: its parameters stay this rank's slices, to which the engine does nothing any more, so that it
        can't be computed with. For deep copies that only hold values, as averages of the weights do. Not collective.
        """
        self._let_go(list(self.units))

    def _let_go(self, units: list[Unit]) -> None:
        unregister(self.model, units)
        self._watch.close()
        if self._runtime.host is not None:
            self._runtime.host.leave(self._runtime)
        self.model.__dict__.pop(_ATTRIBUTE, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        import copy

        model = copy.deepcopy(self.model, memo)
        runtime = copy.deepcopy(self._runtime, memo)
        other = Engine.__new__(Engine)
        memo[id(self)] = other
        other.__init__(model, runtime, self.plan, self.config)  # type: ignore[misc]
        return other


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor] | None) -> list[torch.Tensor] | None:
    if parameters is None:
        return None
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def shard(model: nn.Module, config: ShardConfig | None = None, *, mesh: Any = None, **overrides: Any) -> Engine:
    """Shard a model in place over the ranks of a process group. Collective.

    Where it fails on one rank, all ranks raise and nothing has changed: parameters are what they were, and the model can be
    sharded again. If memory was missing half-way, values have come back from the shards: they are rank 0's under
    `sync_module_states`, and rounded where ``Precision.master_dtype`` is narrower. Only if a rank is lost or interrupted
    meanwhile, parameters that were sharded by then stay so, which is logged.

    Args:
        model: any module; on the CPU, on this rank's GPU, or on meta. Optimizers built earlier stay valid.
        config: every choice; ``overrides`` are fields of :class:`ShardConfig` changed on top.
        mesh: a ``ProcessGroup`` or 1-D ``DeviceMesh``; the default group by default. Without an initialised process
            group the model is prepared for one rank alone. A ``torch.device`` stands for the default, too, and says where
            the model computes: parameters that are on the CPU go there unit by unit, never all at once. Where
            ``torch.distributed.tensor.parallel`` has made parameters DTensors over another dimension of the mesh
            (``mesh["tp"]``), the data-parallel one (``mesh["dp"]``): the engine's ranks are those of both, and gradients
            are averaged over `mesh`.

    Returns:
        The handle. The model keeps its class, its parameter objects, and their names, shapes, dtypes and strides.

    Raises:
        ConfigError: an unknown setting, one that fits nothing in the model, or one that differs between the ranks.
        UnavailableError: no ``torch.distributed``, or no process group in a launched program.
        SetupError: a parameter that can't be sharded, ranks with different models, or a failure on another rank, which it names.
        CheckpointError: this rank can't read the files of :func:`from_files`.
        Exception: what ``ShardConfig.init_fn`` or ``reset_parameters`` has raised on this rank, or torch, for want of memory.
    """
    if config is None:
        config = ShardConfig()
    elif not isinstance(config, ShardConfig):
        hint = "; pass its entries as keywords, shard(model, **config)" if isinstance(config, dict) else ""
        raise ConfigError(f"config must be a ShardConfig, not {type(config).__name__}{hint}.")
    if overrides:
        known = {f.name for f in dataclasses.fields(ShardConfig)}
        unknown = sorted(set(overrides) - known)
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such setting; ShardConfig has {', '.join(sorted(known))}.")
        config = dataclasses.replace(config, **overrides)
    runtime, plan = setup.build(model, config, mesh)
    engine = Engine(model, runtime, plan, config)
    # In __dict__, past nn.Module's __setattr__: it must neither be a submodule nor appear in the state dict.
    model.__dict__[_ATTRIBUTE] = engine
    return engine


def engine_of(model: nn.Module) -> Engine | None:
    """The engine that shards `model`, the module that was given to :func:`shard`, or None. Not collective."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, Engine) else None
