"""``shard()`` and the handle that it returns."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .activation_checkpointing import checkpointed_layers, has_checkpointed_layers, keep_activations
from .close import close_units
from .comm.traffic_statistics import Statistics
from .config.shard_config import ShardConfig
from .errors import ConfigError, ShardError
from .grad_clip import clip, grad_norms
from .optim.state_tree import tensors_of
from .optim.step_watch import StepWatch
from .plan.plan import Plan
from .runtime import backward_inputs, comm_hook_registration, registry, statistics
from .runtime.forward_hooks import unregister
from .runtime.runtime import Runtime
from .state import model_state, optimizer_state
from .unit.unit import Unit
from .unshard import gathered as _gathered

if TYPE_CHECKING:  # torch.distributed.checkpoint takes a second to import
    from .checkpoint.sharded.async_save import PendingSave
    from .checkpoint.sharded.host_snapshot import SnapshotMemory
    from .plan.run_report import Moment
    from .plan.search_results import Search


class Engine:
    """The handle of a sharded model. The model stays a plain module; everything else is reached from here.

    Properties are not collective. A method that is called collective must be called on all ranks of the mesh, in the same
    order. If a rank does not come within ``ShardConfig.timeout`` seconds, the ranks that wait for it raise
    :class:`~torch_shard.errors.MissingRankError`.

    Attributes:
        plan: the :class:`~torch_shard.plan.Plan` in use; ``print(engine.plan.table())``.
        config: the :class:`~torch_shard.ShardConfig` in use.
        recomputes: True if ``strategy="auto"`` has made layers recompute, until :meth:`close`.
        smaller_settings: the settings that take less memory than those that ``strategy="auto"`` chose, which
            out-of-memory errors list.
    """

    _pending: PendingSave | None = None  # the last asynchronous save
    _staging: SnapshotMemory | None = None  # the host memory that such saves copy to

    def __init__(self, model: nn.Module, runtime: Runtime, plan: Plan, config: ShardConfig) -> None:
        self._model = weakref.ref(model)
        self._runtime = runtime
        self.plan = plan
        self.config = config
        self.recomputes = False
        self.smaller_settings: tuple[str, ...] = ()
        registry.note_runtime(runtime, self)
        self._watch = StepWatch(runtime)
        backward_inputs.install(runtime)

    # -- the model and its ranks ---------------------------------------------------------------------------------------------
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
        """The number of ranks of the mesh, those of its tensor-parallel dimension included."""
        return self._runtime.collectives.world

    @property
    def device(self) -> torch.device:
        """The device that the model computes on."""
        return self._runtime.collectives.device

    @property
    def shard_group(self) -> Any:
        """The process group that reduces this rank's gradients, for the state of a communication hook; None with one rank.

        Its ranks share one replica of the parameters. Where each rank has all of them (``no_shard``, ``shard_size=1``) it is
        the group over all ranks, and under tensor parallelism the data-parallel group.
        """
        channel = self._runtime.collectives.reduce_channel
        return None if channel is None else channel.group

    # -- training -----------------------------------------------------------------------------------------------
    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next backward reduces gradients; :meth:`no_sync` sets it to False. Set it equally on all ranks."""
        return self._runtime.require_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._runtime.require_sync = value

    @contextlib.contextmanager
    def no_sync(self, hold: bool = True) -> Iterator[None]:
        """Accumulate unsharded gradients on this rank; the first backward outside reduces their sum.

        This saves the reductions of all micro-batches but one, and costs the memory of one unsharded gradient (4 bytes a
        parameter in fp32). Without it each backward reduces, and `.grad` accumulates sharded results. Until the backward that
        reduces, `.grad` shows this rank's shard of its own gradient: setting it to None or to zero drops what was
        accumulated, and clipping or :meth:`gathered` with `grads` is an error.

        Put forward and backward inside. Not collective, but all ranks must use it alike.

        Args:
            hold: False reduces in each backward inside as well, for code that is written for DistributedDataParallel.
                Clipping and steps, whose results would differ from those with deferred gradients, are errors as with True.

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
        """Make the backward inside reduce gradients, and what was accumulated, though its forward ran under :meth:`no_sync`.

        Use it where several forwards run before their backwards. Not collective, but all ranks must use it alike.
        """
        runtime = self._runtime
        before = runtime.require_sync, runtime.forward_sync
        runtime.require_sync = runtime.forward_sync = True
        try:
            yield
        finally:
            runtime.require_sync, runtime.forward_sync = before

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Make `hook` reduce gradients in place of the engine, from the next backward on. Collective.

        The signatures are those of torch's FullyShardedDataParallel, whose hooks run unchanged (those that compress need a
        GPU). The hook is called during backward with each unit's gradients, once for each dtype in the unit, in one order on
        all ranks, and with zeros where this rank has no gradient:

        - ``hook(state, grad, output)`` where parameters are sharded. It must fill `output`, this rank's shard of the mean.
        - ``hook(state, grad)`` where each rank has all parameters (``no_shard``, ``shard_size=1``). It must make `grad` the
          mean.

        Both tensors are 1-D, have the dtype of the reduction (``ShardConfig.precision``) and are not divided by anything; gaps
        between parameters are zero. Under the hybrid strategies the hook reduces over :attr:`shard_group`, and the engine then
        averages its results over the replicas. With one rank it is not called.

        A hook brings its own process group and timeouts, and :attr:`bytes_sent` does not count what it sends. If it raises,
        all ranks raise at the end of the backward, provided that it leaves no rank waiting in a collective of its own.

        Args:
            state: an object that each call is given, such as compression errors or a process group.
            hook: the function, the same on all ranks.

        Raises:
            ConfigError: the hook can't be called, differs between the ranks, or is not the first one.
            UnitStateError: gradients wait for their reduction (:meth:`no_sync`).
            ShardError: by a backward in which the hook left a gradient of another size, or raised on another rank.
        """
        comm_hook_registration.register(self._runtime, state, hook)

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
            error_if_nonfinite: wait for the norm, and raise where it is NaN or infinite.

        Returns:
            The norm before clipping: a 0-d tensor on the mesh's device, equal on all ranks, in the gradients' promoted
            dtype. Parameters that are not sharded count with rank 0's gradients.

        Raises:
            NonFiniteError: on all ranks, before anything has changed.
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`.
        """
        chosen = _listed(parameters)
        return clip.clip_grad_norm_(self._runtime, chosen, max_norm, norm_type, error_if_nonfinite, self._ignored())

    def clip_grad_value_(self, clip_value: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Limit each element of the gradients to ``[-clip_value, clip_value]``.

        Call it on all ranks, like any other use of gradients.

        Raises:
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`.
        """
        clip.clip_grad_value_(self._runtime, _listed(parameters), clip_value, self._ignored())

    def _ignored(self) -> list[torch.Tensor]:
        """Return the parameters that are not sharded, as far as the model still has them."""
        found: list[torch.Tensor] = []
        for name in self.plan.ignored:
            with contextlib.suppress(AttributeError):
                found.append(self.model.get_parameter(name))
        return found

    # -- optimizers ---------------------------------------------------------------------------------------------
    def attach(self, optimizer: Any) -> None:
        """Make the engine see the steps of an optimizer that torch's step hooks don't see. Not collective.

        Those hooks see every ``torch.optim.Optimizer`` whose ``__init__`` has run. Only an optimizer that skips it, or is of
        another class altogether, needs this call, which replaces the object's ``step``.

        Args:
            optimizer: an object with ``param_groups``, ``state`` and ``step``. If it holds parameters of several sharded
                models, one of their engines is enough.

        Raises:
            ConfigError: the object lacks one of those.
        """
        self._watch.attach(optimizer)

    def step_in_backward(self, optimizer: Any) -> None:
        """Make `optimizer` step during every backward from now on: each unit as soon as its gradients are reduced.

        Gradients are freed at once, so that a rank holds those of two units at most; in exchange, every backward is a step,
        with the learning rates of that moment. ``optimizer.step()`` may stay where it is: it finds gradients only of
        parameters that are not the engine's. A unit that backward still needs once its gradients are complete (because an
        earlier operation used its detached weight) is stepped at the end.

        The user's step hooks are not called. Hooks on accumulated gradients are called before the step, at different moments
        on different ranks, so they must not communicate (`p.grad.norm()` does). With offload the host thread steps while
        backward goes on: whoever reads parameters or state waits for it, and raises what failed there (HostStepError). If the
        ranks turn out to have done different things, some units have been updated already.

        Call on all ranks; not collective.

        Args:
            optimizer: an optimizer of an element-wise class (:mod:`torch_shard.optim`); None ends the steps in backward.

        Raises:
            ConfigError: the optimizer is of another kind, lists a parameter twice, or holds parameters of another sharded
                model. A backward raises it where such parameters were added later.
            ShardError: with ``Offload(nvme=...)``, the optimizer is not one of torch.optim's own. A backward raises it on all
                ranks if it uses a unit again after that unit's step (a weight in two checkpoints with ``use_reentrant=True``;
                some units have been stepped then), under :meth:`no_sync`, and with ``torch.amp.GradScaler``. Functions that
                clip gradients raise it, too.
        """
        self._watch.step_in_backward(optimizer)

    # -- full parameters ----------------------------------------------------------------------------------------
    def gathered(
        self,
        target: Any = None,
        *,
        write: bool = False,
        ranks: int | Iterable[int] | None = None,
        device: torch.device | str | None = None,
        grads: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """Make the modules hold full, plain parameters inside. Collective, on entering and on leaving.

        A forward and backward inside reduce gradients as usual if all ranks have the values on the mesh's device (no `ranks`,
        `device` or `grads`) and the units compute in the dtype that they are stored in. Under ``ShardConfig.precision`` the
        values are those of storage, and a forward inside computes in that dtype, to which its inputs are cast.

        A nested call with the same `ranks` and `device` shares the values. A nested call with different `ranks` or `device` gets
        copies, provided that all ranks have the values.

        Args:
            target: a module, a parameter, or several; everything by default. Units are gathered as a whole.
            write: keep what is changed inside. With `ranks`, the lowest of them decides for all. An exception inside
                writes nothing, on any rank.
            ranks: the ranks that get the values, all by default; the others take part and keep their shards.
            device: the device of the values, for example ``"cpu"``; the mesh's device by default.
            grads: `.grad` of the parameters holds the full gradients; with `write` they are kept, too.

        Raises:
            ConfigError: an argument is wrong.
            UnitStateError: inside a forward of one of the units, or nested in a call for some ranks only, with other `ranks`
                or another `device`.
            ReplacedParameterError: a module holds a parameter that is not the one that was sharded.
            ShardError: with `write`, a parameter got another shape or dtype or was replaced; with `grads`, the
                gradients are not reduced yet (:meth:`no_sync`).
        """
        return _gathered.gathered(self._runtime, target, write=write, ranks=ranks, device=device, grads=grads)

    def apply(self, fn: Callable[[nn.Module], None]) -> None:
        """Call ``model.apply(fn)`` on full parameters, and keep what it changes. Collective.

        `fn` runs on every rank, with that rank's random generators. Raises as :meth:`gathered` does.
        """
        _gathered.apply(self.model, self._runtime, fn)

    # -- state --------------------------------------------------------------------------------------------------
    def state_dict(self, *, form: str = "full", rank0_only: bool = True, offload_to_cpu: bool = True) -> dict[str, Any]:
        """Return the model's state dict, under the names of the unsharded model. Collective if `form` is ``"full"``.

        Args:
            form: ``"full"``: plain tensors of full shape in new memory, as the unsharded model has them. ``torch.save`` them on
                rank 0, and let all ranks wait in a ``torch.distributed.barrier()`` after it.
                ``"sharded"``: ShardTensors of global shape that share memory with the parameters, for
                torch.distributed.checkpoint. Clone them to keep their present values.
            rank0_only: the other ranks get an empty dict of the full form, and hold no more than two full units at a time.
            offload_to_cpu: copy the tensors to the CPU if they are not there.

        Returns:
            The module's own dict. Names, strides and dtypes are those from before sharding.

        Raises:
            ConfigError: another `form`.
            UnitStateError: the full form inside a forward or :meth:`gathered`.
        """
        if form == "sharded":
            return model_state.sharded_state_dict(self.model, self._runtime, offload_to_cpu)
        if form != "full":
            raise ConfigError(f"form must be 'full' or 'sharded', not {form!r}.")
        return model_state.state_dict(self.model, self._runtime, rank0_only=rank0_only, offload_to_cpu=offload_to_cpu)

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load tensors by name. Collective; nothing is changed unless everything fits.

        Args:
            state_dict: full tensors, ShardTensors of any layout whose engine is still open, or some of each; on every rank, on
                any device. Each rank keeps its shards. It may come from any number of ranks or from plain training.
            strict: missing and unexpected entries are errors.

        Returns:
            What ``Module.load_state_dict`` returns: the missing and the unexpected keys.

        Raises:
            StateDictError: on all ranks, with every missing, unexpected and wrongly shaped entry.
            UnitStateError: inside a forward or :meth:`gathered`.
        """
        return model_state.load_state_dict(self.model, self._runtime, state_dict, strict)

    def optim_state_dict(self, optimizer: torch.optim.Optimizer, *, rank0_only: bool = True) -> dict[str, Any]:
        """Return full optimizer state by parameter name, on the CPU. Collective.

        ``optimizer.state_dict()`` gives what this rank has: shards of the state, and of optimizers that step on full matrices
        (:mod:`torch_shard.optim`) the state of those that this rank owns.

        One rank alone may call it, while the others do something else, if the optimizer is element-wise and its state is on the
        devices.

        Args:
            optimizer: an optimizer that holds parameters of this model.
            rank0_only: the other ranks get an empty dict.

        Returns:
            ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: the optimizer's own state dict
            with names in place of numbers, and state of the parameters' global shapes.

        Raises:
            StateDictError: the optimizer holds none of this model's parameters, or those of several sharded models. For the
                latter use :meth:`save` with `models`.
        """
        return optimizer_state.optim_state_dict(self._runtime, optimizer, rank0_only, self.model)

    def load_optim_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`optim_state_dict` gave, on any number of ranks. Collective: every rank needs the dict.

        Parameters are matched by name, groups by position; hyperparameters come from the dict. A parameter without
        state needs an empty entry if the optimizer holds state for it now.

        Raises:
            StateDictError: on all ranks, with everything that does not fit; nothing has been loaded.
        """
        optimizer_state.load_optim_state_dict(self._runtime, optimizer, state_dict, self.model)

    # -- checkpoints --------------------------------------------------------------------------------------------
    def save(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        extra: Any = None,
        models: Mapping[str, Any] | None = None,
        keep: int | None = None,
        asynchronous: bool = False,
    ) -> PendingSave | None:
        """Write a checkpoint that any number of ranks can load. Collective.

        Each rank writes its shards, in the parameters' shapes and under their names, in the format of
        torch.distributed.checkpoint. The directory appears in one step when all of it is durable: if a process is killed, what
        was at `path` before is still there. The whole directory belongs to the checkpoint, and the next save to it deletes
        what else is in it.

        Args:
            path: the directory, the same on all ranks, on a file system that they share.
            optimizer: one, several in a list (their parameters differ), or a dict of them by name.
            extra: plain Python objects and tensors, which :meth:`load` returns; rank 0's are saved, and those of other ranks
                are not looked at.
            models: further sharded models by name: engines, or modules given to :func:`torch_shard.shard`. An optimizer may
                hold the parameters of several of them.
            keep: the number of checkpoints that remain, this one included: the oldest ones beside it are deleted when it is
                complete. The name needs a number, as in ``step-100``. Only directories with a manifest whose names differ in that
                number alone count.
            asynchronous: return when everything has been copied to host memory; threads write the files while training goes
                on. The memory, as much as this rank holds of parameters and optimizer state, is kept for the next save until
                :meth:`close`. The next :meth:`save`, :meth:`load`, :meth:`finish_saving` or :meth:`close`, and the end of the
                program, wait for this save; the methods raise its failure on all ranks.

        Returns:
            An object with ``done()`` and ``wait()`` if the save is asynchronous, else None.

        Raises:
            CheckpointError: on all ranks: the path can't be written, the disk is full, the ranks don't share the path, or `extra`
                or the optimizer's state holds objects that would not be loaded again. Nothing has changed. Or the
                asynchronous save before this one has failed; then this one has not begun.
            ConfigError: an argument is wrong.
            DivergenceError: the ranks passed different arguments.
            UnitStateError: inside a forward or ``engine.gathered()``.
        """
        from .checkpoint import save

        return save(self, path, optimizer, extra=extra, models=models, keep=keep, asynchronous=asynchronous)

    def finish_saving(self) -> None:
        """Wait until the last asynchronous save is durable, if there was one. Not collective.

        Raises:
            CheckpointError: the save has failed; raised once, on every rank that asks.
        """
        if self._pending is not None:
            self._pending.wait()  # raises once; the next call finds it ended
            self._pending = None

    def save_full(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        extra: Any = None,
        format: str | None = None,
        dtype: torch.dtype | None = None,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write the full model in a format that plain torch or Hugging Face's tools can read. Collective.

        Parameters are gathered one unit at a time and written by rank 0. No rank holds more than two units in addition to its
        shards; when it writes safetensors, rank 0 also holds one output file. Only rank 0 needs to see `path`. What was there is
        replaced in one step, when everything is durable.

        A torch file holds the model's state dict itself, for ``model.load_state_dict(torch.load(path))`` in plain torch. With an
        optimizer or `extra` it is ``{"model": ..., "optimizer": ..., "extra": ...}``, where optimizer state is by number, as
        ``optimizer.state_dict()`` of an unsharded model has it; several optimizers are a list, or a dict by name.

        Safetensors files hold tensors by name, and only one of several tied weights. A directory has ``model.safetensors``, or
        ``model-00001-of-0000N.safetensors`` with ``model.safetensors.index.json``, as transformers' ``from_pretrained`` reads it;
        its other files are kept.

        Args:
            path: the torch file, one safetensors file (``.safetensors``), or the directory.
            optimizer: one, several in a list, or a dict of them by name; torch files only.
            extra: plain Python objects and tensors; rank 0's are saved; torch files only.
            format: ``"torch"`` or ``"safetensors"``. By default the name decides: safetensors for ``.safetensors``, for a
                directory that exists and for a name without a suffix of letters; else torch.
            dtype: the dtype of the model's floating-point entries in the file; None leaves them as they are.
            max_shard_size: the limit of safetensors files in a directory, in bytes or as text such as ``"5GB"``. A tensor is
                never divided.

        Raises:
            CheckpointError: on all ranks: the path can't be written, the disk is full, what is at the path would be lost, or
                there are objects that would not be loaded again, or not in this format. What was there is as it was.
            ConfigError: an argument is wrong, or an optimizer or `extra` was given for safetensors.
            DivergenceError: the ranks passed different arguments.
            StateDictError: the optimizer holds parameters of another sharded model, or none of this one.
            UnavailableError: the safetensors library is not installed.
            UnitStateError: inside a forward or :meth:`gathered`.
        """
        from .checkpoint import save_full

        save_full(self, path, optimizer, extra=extra, format=format, dtype=dtype, max_shard_size=max_shard_size)

    def load(
        self,
        path: str | os.PathLike[str],
        optimizer: Any = None,
        *,
        dtype: torch.dtype | None = None,
        models: Mapping[str, Any] | None = None,
    ) -> Any:
        """Load a checkpoint of :meth:`save`, :meth:`save_full`, DCP, plain torch or Hugging Face's tools. Collective.

        It may come from any number of ranks, any strategy and any units, from FSDP2, DDP or an unsharded model, and each rank
        reads its shards only. Checkpoints of :meth:`save` are verified, all files of them, before anything is changed. What
        torch.distributed.checkpoint has written has no checksums, and is read into new memory first.

        Full checkpoints are torch files (a state dict by itself, in ``{"model": ...}`` or ``{"state_dict": ...}``, with optimizer
        state by number or by name; Lightning's checkpoints, too) or safetensors. They are mapped, their entries are compared with
        the model, the ranks verify the CRC-32 of torch files between them, and then each rank copies its shards; the full model
        is never in memory. Safetensors have no checksums, so that damage to their values goes unnoticed.

        Args:
            path: a directory, or a file; every rank must see the same one.
            optimizer: one or several, as :meth:`save` takes them; None leaves optimizers alone.
            dtype: convert floating-point entries to this dtype where the model has it and the checkpoint another one. Without it
                that is an error.
            models: further models, as :meth:`save` takes them.

        Returns:
            The `extra` that was saved, on every rank; None where there is none.

        Raises:
            CheckpointError: on all ranks: there is no checkpoint, files are missing or damaged, or it holds objects that are
                not loaded because unpickling them could run code. Nothing has changed.
            StateDictError: on all ranks, with everything that is missing, unexpected, or of another shape or dtype. Nothing has
                changed.
            UnitStateError: inside a forward or ``engine.gathered()``.
        """
        from .checkpoint import load

        return load(self, path, optimizer, dtype=dtype, models=models)

    # -- figures ------------------------------------------------------------------------------------------------
    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for parameters and gradients since set-up, those of deep copies of the model included.

        ``full_tensor()`` is included. The least that the ranks must send each other is counted, whatever algorithm the backend
        uses: for a gather, a rank's own slot once for each other rank; for a reduce-scatter over n ranks, (n-1)/n of the
        buffer, and twice that for an all-reduce; for a broadcast, on the rank that sends, the tensor once for each other rank.
        """
        return self._runtime.collectives.all_bytes_sent

    @property
    def bytes_sent_across(self) -> int:
        """The part of :attr:`bytes_sent` that went between replicas, under the hybrid strategies and ``no_shard``."""
        return self._runtime.collectives.bytes_sent_across

    def statistics(self) -> Statistics:
        """Return this rank's figures up to now: bytes sent, seconds waited, bytes gathered. Not collective, and cheap.

        ``after.since(before)`` gives the figures of some steps. On the CPU, waiting is the time that the training thread stood
        still; for GPUs see :meth:`time_waiting`. What a communication hook sends and waits for is not counted. Bytes sent and
        waiting include those of deep copies of the model.
        """
        return statistics.statistics(self._runtime)

    def time_waiting(self, enabled: bool = True) -> None:
        """Measure, from now on, how long the computing streams of a GPU wait for collectives. Not collective.

        Without this call :meth:`statistics` has no waiting for gathers and reductions on GPUs; on the CPU the call does nothing.
        Two events are recorded around each wait, which takes the host some microseconds, and read when they have passed, so
        that the host never waits for the device. A wait counts from the moment at which the stream reaches it; time in which
        the stream is idle because the host is late does not count. Waits for small messages (``other_wait``) are always
        measured on the host.
        """
        statistics.time_waiting(self._runtime, enabled)

    def reset_peak_gathered(self) -> None:
        """Reset ``statistics().peak_gathered`` to what is gathered now. Not collective."""
        gathered = self._runtime.gathered_bytes
        gathered.peak = gathered.now

    def memory_summary(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> dict[str, int]:
        """Return the bytes that this rank holds now. Not collective.

        Args:
            optimizer: one or several whose state is counted; without it ``optimizer`` is 0.

        Returns:
            Bytes under ``parameters`` (this rank's shards), ``gradients`` (with what error feedback keeps of quantized
            ones), ``optimizer``, and ``gathered`` (full units, and what ``reshard_after_forward`` keeps of others).
        """
        several: Any = () if optimizer is None else optimizer if isinstance(optimizer, Iterable) else (optimizer,)
        entries = [entry for each in several for entry in each.state.values()]
        return {
            "parameters": statistics.parameter_bytes(self._runtime),
            "gradients": statistics.gradient_bytes(self._runtime),
            "optimizer": sum(statistics.own_bytes(tensor) for entry in entries for tensor in tensors_of(entry)),
            "gathered": self._runtime.gathered_bytes.now,
        }

    def report(
        self,
        path: str | os.PathLike[str],
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        history: Sequence[Moment] = (),
        profile: str | os.PathLike[str] | None = None,
        predicted: Search | None = None,
    ) -> None:
        """Write this rank's figures as an HTML page with pictures, for which matplotlib is needed. Not collective.

        The page loads nothing from the network. It compares what the rank holds with what was planned, and shows what the rank
        has sent and waited for, and the units by their bytes. All of this is counted anyway, so reports make no step slower.

        Args:
            path: a file whose name ends in ``.html``, which is replaced.
            optimizer: one or several whose state is counted, as for :meth:`memory_summary`.
            history: the course of the run, as :class:`lightning_shard.ShardMonitor` records it.
            profile: a file of ``torch.profiler``'s ``export_chrome_trace``, with one step of this rank, or with several if the
                profiler was given a schedule; then the last one counts. The page shows its streams, what computing has waited
                for, and memory if it was recorded.
            predicted: the result of :func:`torch_shard.plan.search`, whose first candidate must have this engine's settings. The
                page then draws the predicted memory by kind under the measured memory, and the budget as a line. The profile
                must have recorded memory.

        Raises:
            ConfigError: the path can't be written to; the profile can't be read, or has no step of this model; or `predicted` is
                given, and no memory was profiled.
        """
        from .plan.profiled_step import ProfiledStep
        from .plan.run_report import run_report
        from .utils.html_page import check_path

        file = check_path("engine.report", os.fspath(path))
        counted = self.statistics()
        held = {**self.memory_summary(optimizer), "peak_gathered": counted.peak_gathered}
        title = f"{type(self.model).__name__}, rank {self.rank} of {self.world_size}"
        step = None
        if profile is not None:
            on_device = self._runtime.collectives.streams.exist
            step = ProfiledStep.read(profile, [unit.name for unit in self.plan.units], on_device)
        if predicted is not None and (step is None or not step.memory):
            raise ConfigError(
                "engine.report(predicted=...) needs profile=... of a step that was recorded with profile_memory=True."
            )
        file.write_text(run_report(title, self.plan, counted, held, history, step, predicted), encoding="utf-8")

    def grad_norms(
        self, norm_type: float = 2.0, parameters: Iterable[torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the norm of each unit's full gradients. Collective: one small message for all units.

        Args:
            norm_type: any p > 0, ``inf`` included.
            parameters: count these alone, the same on all ranks; all that are sharded by default.

        Returns:
            For each unit's name a 0-d tensor of float64 on the engine's device, equal on all ranks; 0 without a gradient.

        Raises:
            ConfigError: another `norm_type`.
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`; or there are
                none to look at, because an optimizer steps in backward.
        """
        return grad_norms.grad_norms(self._runtime, norm_type, parameters)

    # -- the end ------------------------------------------------------------------------------------------------
    def close(self, *optimizers: torch.optim.Optimizer) -> None:
        """Give the plain model back: full parameters in the same objects, without the engine's hooks. Collective.

        Gradients become full, too, and so does the state that the given `optimizers` have of this model; the user's own hooks
        stay. The state of an optimizer that is not given stays sharded, or with the ranks that own the parameters: it can go
        on with another engine, but not with the plain model. Every rank needs memory for the full model.

        Raises:
            UnitStateError: inside a forward or :meth:`gathered`, or where a graph or a weak reference still holds a
                parameter; nothing has changed then.
            CheckpointError: an asynchronous :meth:`save` has failed; nothing has changed, and the next call closes.
        """
        if self._staging is not None:  # there were asynchronous saves, on all ranks
            from .comm.collective_steps import each

            each(self._runtime, "engine.close", self.finish_saving)
        units = list(self.units)
        close_units(self._runtime, optimizers, self.model)
        if self.recomputes:
            keep_activations(self.model)
        self._let_go(units)  # last: a close that is refused must leave the hooks
        self._runtime.collectives.drop_spares()
        self._staging = None

    def _abandon(self) -> None:
        """Leave the model with this rank's shards as its parameters; it can't compute any more. Not collective.

        This is for deep copies that only hold values, such as averages of the weights.
        """
        self._let_go(list(self.units))

    def _let_go(self, units: list[Unit]) -> None:
        unregister(self.model, units)
        self._watch.close()
        service = self._runtime.collectives.service
        if service is not None:
            service.withdraw(self._runtime.operations.model)
        if self._runtime.host is not None:
            self._runtime.host.leave(self._runtime)
        registry.forget(self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        return Engine(copy.deepcopy(self.model, memo), copy.deepcopy(self._runtime, memo), self.plan, self.config)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._runtime.__reduce_ex__(protocol)  # raises


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor] | None) -> list[torch.Tensor] | None:
    if parameters is None:
        return None
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


instead_of_sharding: Callable[[nn.Module, ShardConfig], Engine] | None = None
"""The function that :func:`shard` calls instead while :mod:`torch_shard.launch.planned_script` plans a script."""


def shard(model: nn.Module, config: ShardConfig | None = None, *, mesh: Any = None, **overrides: Any) -> Engine:
    """Shard a model in place over the ranks of a process group. Collective.

    Where it fails on one rank, all ranks raise and nothing has changed: parameters are what they were, and the model can be
    sharded again. If memory runs out half-way, the values are restored from the shards, so with `sync_module_states` they are
    rank 0's. Only if a rank is lost or interrupted meanwhile, or if memory does not suffice for restoring, may some parameters
    stay sharded; an error in the log names them.

    Args:
        model: any module; on the CPU, on this rank's GPU, or on meta. Optimizers built earlier stay valid.
        config: every choice; ``overrides`` are fields of :class:`ShardConfig` changed on top.
        mesh: a ``ProcessGroup`` or 1-D ``DeviceMesh``; the default group by default. Without an initialised process
            group the model is prepared for one rank alone. A ``torch.device`` means the default group and says where the model
            computes: parameters that are on the CPU go there unit by unit, never all at once. If
            ``torch.distributed.tensor.parallel`` has made parameters DTensors over one dimension of a mesh (``mesh["tp"]``),
            pass the data-parallel dimension (``mesh["dp"]``): the engine's ranks are those of both, and gradients are averaged
            over `mesh`.

    Returns:
        The handle. The model keeps its class, its parameter objects, and their names, shapes, dtypes and strides.

    Raises:
        ConfigError: an unknown setting, one that fits nothing in the model, or one that differs between the ranks.
        UnavailableError: no ``torch.distributed``, or no process group in a launched program.
        SetupError: a parameter that can't be sharded, ranks with different models, or a failure on another rank, which it names.
        CheckpointError: this rank can't read the files of :func:`from_files`.
        BudgetError, TraceError: ``strategy="auto"`` finds nothing that fits, or can't plan this script.
        Exception: what ``ShardConfig.init_fn`` or ``reset_parameters`` has raised on this rank, or torch because memory
            has run out.
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
    if instead_of_sharding is not None:
        return instead_of_sharding(model, config)
    # Imported here because many processes import this package and shard nothing: workers of data loaders, for example.
    from .setup import build
    from .setup.auto_settings import Chosen, choose_settings

    chosen = Chosen(config)
    if config.strategy == "auto":
        chosen = choose_settings(model, config, mesh, has_checkpointed_layers(model))
        config = chosen.config
    with checkpointed_layers(model, chosen.layers, config.units, chosen.offloaded):
        runtime, plan = build.build(model, config, mesh)
    engine = Engine(model, runtime, plan, config)
    engine.recomputes, engine.smaller_settings = bool(chosen.layers), chosen.smaller
    registry.note(model, engine)
    return engine


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine that shards `model`, the module that was given to :func:`shard`, or None. Not collective."""
    found: Engine | None = registry.engine_of(model)
    return found
