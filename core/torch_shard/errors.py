"""The errors that the engine raises, in one hierarchy.

Every error is a :class:`ShardError`. Messages name the parameter (or unit, or argument), the rank
where it matters, and what to do. None of them leaves the process group unusable, unless its
docstring says so: errors that every rank can see are raised on every rank.
"""

from __future__ import annotations

__all__ = [
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "DiskError",
    "DivergenceError",
    "HostMemoryError",
    "HostStepError",
    "LayoutError",
    "MissingRankError",
    "NeedsGatherError",
    "NonFiniteError",
    "PinnedMemoryError",
    "ReplacedParameterError",
    "SetupError",
    "ShardError",
    "ShardPicklingError",
    "StateDictError",
    "TraceError",
    "UnavailableError",
    "UnitStateError",
]


class ShardError(RuntimeError):
    """Base of every error raised by the engine.

    Raised: mostly as one of its subclasses; itself where none of them fits, such as for a gradient that is not
    reduced yet or can't be sharded.
    Remedy: as the message says; catch this one to handle all of them.
    """


class ConfigError(ShardError, ValueError):
    """A user choice is unknown, has the wrong type, or contradicts another one.

    Raised: when a :class:`~torch_shard.ShardConfig` is built (the message starts with the
    field's name), and by ``shard()`` and the engine's methods where an argument does not fit the
    model or the process group; also by a ``backward()`` of a scaled loss with error feedback, and by
    the step of an unknown optimizer with stochastic rounding. Nothing has been changed yet.
    Remedy: correct the named field.
    """


class UnavailableError(ShardError):
    """Something that sharding needs is not there.

    Raised: by ``shard()`` when torch is older than the supported floor, was built without
    ``torch.distributed``, has no process group initialised, or lacks the backend for the device, or
    when the device lacks a dtype that is asked for (bfloat16, float8);
    by ``engine.save_full`` and ``engine.load`` where safetensors are not installed.
    Importing the packages never raises it.
    Remedy: install or initialise what the message names.
    """


class SetupError(ShardError):
    """The model cannot be sharded as it is.

    Raised: by ``shard()`` before any parameter was changed: a module that is already sharded,
    parameters on mixed devices, two parameters that are views of one storage, a parameter class
    that the engine does not know, one that is referenced weakly or held by a live graph, a
    parameter that no initialiser filled, or ranks that built different models.
    Remedy: the message names the parameter and what to change about it.
    """


class HostStepError(ShardError):
    """Work on offloaded parameters, gradients or optimizer state has failed in the background.

    Raised: with ``ShardConfig.offload``, in the training thread, where the result is needed next: in the next forward, in a
    checkpoint, or where a parameter is read. The message names the parameter group; ``__cause__`` is the original error.
    Parameters and state may be updated only in part, as after an exception in ``optimizer.step()``.
    Remedy: correct what the cause says and go on from a checkpoint.
    """


class LayoutError(SetupError):
    """A parameter's memory layout cannot be placed in a flat buffer.

    Raised: while planning, for strides that overlap or leave gaps (``expand``, slicing), and when
    the numbers of a layout contradict each other, which is a defect of the engine.
    Remedy: give the named parameter dense memory, ``nn.Parameter(p.detach().clone())``.
    """


class ReplacedParameterError(ShardError):
    """A module holds a parameter that is not the one that was sharded.

    Raised: when a unit is gathered and ``module._parameters[name]`` is not the parameter known
    from sharding: a layer was replaced (``model.head = nn.Linear(...)``), a parameter was added,
    or ``load_state_dict(assign=True)`` put new ones in.
    Remedy: change the model before ``shard()``, or call ``engine.close()``, change it and shard
    again; load values with ``load_state_dict`` without ``assign``.
    """


class NeedsGatherError(ShardError):
    """An operation needs the full values of a sharded tensor, which are not gathered.

    It is deliberately not a TypeError: in ``a @ b`` and ``a * b`` torch treats a TypeError as "not implemented", and replaces it
    with a message of its own.

    Raised: for access to the memory of a sharded tensor (``numpy()``, ``data_ptr()``); for views of
    gradients and optimizer state that leave gaps (``p.grad[:, 0]``), and edits of them by indices;
    inside the step of an optimizer that the engine does not know.
    Remedy: ``with engine.gathered(parameter): ...``; add ``write=True`` to change it there, and
    ``grads=True`` for its gradient. To read a gradient, ``p.grad.full_tensor()``.
    """


class ShardPicklingError(ShardError, TypeError):
    """A shard was about to be pickled, and this rank can't read its full values alone.

    Raised: by ``pickle``, ``torch.save`` and everything that uses them, for gradients and engines, and for parameters and
    optimizer state where one rank can't read them alone.
    Remedy: ``engine.state_dict(form="full")`` on all ranks, then save the result on one of them, and call
    ``torch.distributed.barrier()`` on all ranks afterwards; for optimizers ``engine.optim_state_dict(optimizer)``.
    """


class StateDictError(ShardError):
    """A state dict does not fit the model or the optimizer.

    Raised: when loading, with *all* missing, unexpected and wrongly shaped entries listed, and when
    saving an optimizer that holds parameters of another model, or none of this one. Nothing has been
    loaded or written.
    Remedy: correct the listed entries, or load with ``strict=False`` to accept missing and
    unexpected ones.
    """


class DivergenceError(ShardError):
    """The ranks did different things.

    Raised: when the ranks ran different units or operations, ran them in a different order, passed
    different arguments, or changed the parameters differently; usually on all ranks and before any
    optimizer step. A rank that can't read the model alone, or that runs a backward through a value
    it has read alone, raises it by itself. The message names the first difference and the ranks.
    Remedy: make every rank run the same modules in the same order. Conditions in forward must not
    depend on the rank or on its own data.
    """


class MissingRankError(ShardError):
    """A rank waited for a partner that did not come within ``ShardConfig.timeout`` seconds.

    Raised: on the ranks that wait, naming the operation, the unit or parameter, the line that
    called it, and the ranks that are missing with what they are doing instead. Typically a backward,
    an optimizer step or an edit under ``if rank == 0:``, or ranks with different numbers of batches
    to train on.
    Remedy: call the named operation on all ranks. After long work by one rank (writing a checkpoint),
    call ``torch.distributed.barrier()`` on all ranks. Otherwise set a larger ``timeout``.
    """


class NonFiniteError(ShardError):
    """The total norm of the gradients is NaN or infinite.

    Raised: on all ranks, by ``engine.clip_grad_norm_(..., error_if_nonfinite=True)``. The
    gradients have not been changed.
    Remedy: skip the step, or lower the learning rate; ``error_if_nonfinite=False`` accepts it.
    """


class UnitStateError(ShardError):
    """A unit was used in a state that does not allow it.

    Raised: when compute reaches a parameter whose unit is not gathered or is still being gathered,
    when the model is copied while its forward runs, and for a gather during the capture of a CUDA
    graph. Without this error, freed memory would be read.
    Remedy: the message says which use of the named unit went past the engine; running that code
    through a module's ``forward`` or inside ``engine.gathered(...)`` avoids it.
    """


class CheckpointError(ShardError):
    """A checkpoint can't be written or read.

    Raised: on all ranks, by ``engine.save``, ``engine.save_full`` and ``engine.load``: a path that can't be written or that the
    ranks don't share, a full disk, files that are missing, damaged or made by a newer version, and objects that are not loaded
    because unpickling them could run code. The state of training and the previous checkpoint are unchanged, unless the message
    says that values have been overwritten. If a save with ``asynchronous=True`` fails, the next call raises the error.
    Remedy: the message names file and parameter, and what to do.
    """

    _is_unsupported = False  # True where nothing is damaged, but this version can't read such a checkpoint


class HostMemoryError(ShardError):
    """Host memory for offload can't be allocated.

    Raised: on all ranks, by ``shard()`` before anything is allocated, if the ranks of a host together need more memory than the
    machine, their container or their job has left, or if the system refuses the allocation. In a forward, on the rank that lacks
    the memory, where inputs of layers are offloaded.
    Remedy: the message has the figures of each rank and host. Keep more on the device or on disk (``Offload``), or use
    fewer ranks on a host, or a higher limit.
    """


class PinnedMemoryError(HostMemoryError):
    """Host memory can't be page-locked.

    Raised: on all ranks, by ``shard()``, where the CUDA runtime refuses to lock the memory that parameters or gradients are to
    be kept in; in a forward, on the rank that lacks it, for inputs of layers that are offloaded.
    Remedy: ``Offload(pin_memory=False)`` uses ordinary memory, with copies that block; or leave the machine more memory.
    """


class DiskError(ShardError):
    """The directory in which optimizer state is kept can't be used.

    Raised: by ``shard()`` and by whatever allocates state, before anything else has changed: the directory can't be written, or
    the disk is full (space is taken when state is made, never later). Also by the next step after a transfer has failed in the
    background.
    Remedy: the message names the directory, and what to do. Another directory, on a local disk, always helps.
    """


class TraceError(ShardError):
    """A training step can't be traced on fake tensors.

    Raised: by :func:`torch_shard.plan.search` and ``torch-shard plan``: a shape depends on values (``nonzero``, ``unique``, a
    boolean mask as index), an operator or a library needs real memory, a parameter is of a class that has no fake, or the step
    itself raises; and by the latter for a script that fails before its first step is over, or shards no model, or two.
    The message has the operator and the line of the user's code; ``__cause__`` is the error. The model is as it was.
    Remedy: compute what depends on values outside of the step, or in a form of fixed shape.
    """


class BudgetError(ShardError):
    """No settings let a step fit a budget of memory.

    Raised: by :attr:`torch_shard.plan.Search.best`. The message says which settings come closest, and how much memory parameters,
    gradients and optimizer state take in any case.
    Remedy: more ranks, or a smaller or shorter batch than was tried.
    """
