"""All settings of ``torch_shard.shard`` in one frozen, validated dataclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from ..errors import ConfigError
from ..utils.patterns import check_pattern
from .bytes_text import read_bytes
from .checks import check_bools, check_int, check_number, checked_entries, checked_modules
from .offload import Offload, offload_of
from .precision import Precision, precision_of
from .quantization import Quantized

Strategy = Literal[
    "full_shard", "shard_grad_op", "shard_optim", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "auto"
]
"""``full_shard`` (ZeRO-3), ``shard_grad_op`` (ZeRO-2), ``shard_optim`` (ZeRO-1), ``hybrid_shard`` and ``hybrid_shard_zero2``
(sharded within a node, replicated between nodes), ``no_shard`` (as DDP does) or ``auto`` (the fastest that fits)."""

Units: TypeAlias = "Sequence[type[nn.Module] | str] | Sequence[Sequence[str]] | Callable[[str, nn.Module], bool] | None"
"""The ways to choose units; see :attr:`ShardConfig.units`."""

Ignored: TypeAlias = "Sequence[nn.Module | nn.Parameter | str]"
"""The modules and parameters that are not sharded; see :attr:`ShardConfig.ignore`."""


@dataclass(frozen=True)
class ShardConfig:
    """The settings of ``torch_shard.shard``.

    They must be equal on all ranks, except for `timeout`, `debug`, `init_fn` and `registered_memory`. Values are checked on
    construction.

    Attributes:
        strategy: ``"full_shard"`` shards parameters, gradients and optimizer state;
            ``"shard_grad_op"`` keeps the parameters gathered from forward to the end of backward;
            ``"shard_optim"`` keeps them until an optimizer changes them, so that with ``no_sync()``
            no more is sent than by DDP, however many micro-batches there are;
            ``"hybrid_shard"`` shards over the ranks of a node as ``"full_shard"`` does, with a replica on each node: only
            gradients are sent between nodes, `shard_size` times fewer bytes than under ``"no_shard"``;
            ``"hybrid_shard_zero2"`` does the same with parameters as under ``"shard_grad_op"``;
            ``"no_shard"`` replicates everything and all-reduces gradients;
            ``"auto"`` plans the script that calls ``shard``, as ``torch-shard plan`` does, and takes the fastest of these that
            fits `memory`, with the `prefetch` and `offload` that belong to it, and activation checkpointing and offload if
            nothing fits without. Rank 0 runs the script once more for that, up to its first step, in another process.
        units: the parameters that are gathered together. ``None`` plans automatically: the repeated
            blocks, else runs of about `unit_bytes`. Otherwise it is one of:
            module classes and patterns of module names, which may be mixed: each matching module is
            a unit (a pattern is a glob such as ``"layers.*"``, in which ``*`` also matches dots,
            or with the prefix ``"re:"`` a regular expression for the full name);
            groups, which are a sequence of sequences of parameter names; or
            a callable ``(module name, module) -> bool`` that returns True if the module is a unit.
        unit_bytes: the target size of an automatic unit, in bytes of parameters.
        prefetch: the number of units that are gathered ahead of compute, in forward and in backward; 0 for none.
        sync_module_states: send rank 0's parameters and buffers to all ranks in ``shard``.
        broadcast_buffers: send rank 0's buffers to all ranks before the first forward, and before each forward that follows one
            with gradients outside ``no_sync()``, as ``DistributedDataParallel`` does.
        reshard_after_forward: the number of consecutive ranks, as a rule those of a node, among which each unit stays sharded
            between forward and backward, so that backward's gather stays among them. This needs more memory (a unit's size
            divided by this number, for all units) and sends less between nodes. It is for ``"full_shard"`` and
            ``"hybrid_shard"``. ``None`` shards among all ranks of a replica.
        shard_size: the number of consecutive ranks that share a replica under the hybrid strategies. ``None`` takes the ranks of
            a node (``LOCAL_WORLD_SIZE``, else the number of GPUs), or the mesh of two dimensions.
        mesh_dims: the names of the dimensions of the `DeviceMesh` given to ``shard`` that this model is sharded over: one, or
            for the hybrid strategies two, replicas and shards. ``None`` takes all that it has.
        precision: the dtypes in which parameters are stored, gathered and reduced; see
            :class:`~torch_shard.Precision`. A dtype, say ``torch.bfloat16``, stands for ``Precision(param_dtype=...)``. ``None``
            leaves every dtype as it is.
        quantized: the parameters and gradients that are sent as 8-bit codes; see
            :class:`~torch_shard.Quantized`. ``None`` sends every value as it is. Not with ``"no_shard"``.
        offload: the tensors that lie in host memory if a model is too large for its device: ``"cpu"`` for parameters and
            optimizer state, or an :class:`~torch_shard.offload.Offload`. ``None`` offloads nothing.
        ignore: modules, parameters, and globs of parameter names that are not sharded, nor
            synchronised, nor reduced.
        init_fn: a function that is called with each module that directly holds parameters or buffers on the meta
            device, after these got memory, and must fill them. ``None`` calls the module's own
            ``reset_parameters()``.
        timeout: the seconds that a rank waits for a missing partner before it raises
            :class:`~torch_shard.errors.MissingRankError`. On accelerators it is at least 300 until the first step has ended,
            because the ranks compile kernels during it.
        alone: ``"read"`` lets one rank read the model while the others do something else: a forward without gradients, a state
            dict, one value under ``if rank == 0:``. ``"error"`` makes it a :class:`~torch_shard.errors.DivergenceError`.
        alone_after: the seconds that a rank which wants to read waits for ranks that are still computing. It does not wait for
            ranks that wait for something else.
        debug: compare each gathered unit with its shard before it is resharded, in every iteration.
            This finds edits of ``.data`` inside forward, and is slow.
        single_communicator: use one communicator for gathers and reductions, which then don't
            overlap each other. It is for systems on which two NCCL communicators misbehave.
        registered_memory: gathers fill, and reductions use, memory that NCCL has registered with its communicators
            (``torch.cuda.MemPool``), which it can send without copies of its own. This is for trials: it was never run with NCCL.
        memory: for ``"auto"``, the bytes of each rank's device, or a text such as ``"70GiB"``. 5 % of it stays free, and on GPUs
            1 GiB for the context and the communicators. ``None`` takes the memory of the GPU; on CPUs what is free, divided by
            the ranks of the node.

    Raises:
        ConfigError: a value is unknown or of the wrong type; the message starts with the field.

    Not collective.
    """

    strategy: Strategy = "full_shard"
    units: Units = None
    unit_bytes: int = 32 << 20
    prefetch: int = 1
    sync_module_states: bool = True
    broadcast_buffers: bool = True
    reshard_after_forward: int | None = None
    shard_size: int | None = None
    mesh_dims: str | Sequence[str] | None = None
    precision: Precision | torch.dtype | None = None
    quantized: Quantized | None = None
    offload: Offload | str | None = None
    ignore: Ignored = ()
    init_fn: Callable[[nn.Module], None] | None = None
    timeout: float = 30.0
    alone: Literal["read", "error"] = "read"
    alone_after: float = 1.0
    debug: bool = False
    single_communicator: bool = False
    registered_memory: bool = False
    memory: int | str | None = None

    def __post_init__(self) -> None:
        if self.strategy not in get_args(Strategy):
            choices = ", ".join(map(repr, get_args(Strategy)))
            raise ConfigError(f"strategy must be one of {choices}, not {self.strategy!r}.")
        self._check_auto()
        check_int("unit_bytes", self.unit_bytes, least=1)
        check_int("prefetch", self.prefetch, least=0)
        if self.shard_size is not None:
            check_int("shard_size", self.shard_size, least=1)
            if not self.is_hybrid:
                raise ConfigError(f"shard_size is for the hybrid strategies; strategy is {self.strategy!r}.")
        if self.reshard_after_forward is not None:
            check_int("reshard_after_forward", self.reshard_after_forward, least=2)
            if not self.reshards:
                raise ConfigError(
                    "reshard_after_forward is for strategies that reshard between forward and backward, full_shard and "
                    f"hybrid_shard; strategy is {self.strategy!r}."
                )
        object.__setattr__(self, "mesh_dims", _checked_dims(self.mesh_dims))
        check_bools(
            self, "sync_module_states", "broadcast_buffers", "debug", "single_communicator", "registered_memory"
        )
        self._check_timeout()
        if self.alone not in ("read", "error"):
            raise ConfigError(f"alone must be 'read' or 'error', not {self.alone!r}.")
        check_number("alone_after", self.alone_after, "seconds")
        if self.init_fn is not None and not callable(self.init_fn):
            raise ConfigError(
                f"init_fn must be None or a function that takes a module, not {type(self.init_fn).__name__}."
            )
        if isinstance(self.precision, torch.dtype):
            object.__setattr__(self, "precision", precision_of(self.precision))
        elif self.precision is not None and not isinstance(self.precision, Precision):
            raise ConfigError(
                f"precision must be a torch_shard.Precision, a torch.dtype or None, not {self.precision!r}."
            )
        if self.quantized is not None and not isinstance(self.quantized, Quantized):
            raise ConfigError(f"quantized must be a torch_shard.Quantized or None, not {self.quantized!r}.")
        if self.quantized is not None and self.strategy == "no_shard":
            raise ConfigError(
                "quantized: strategy 'no_shard' gathers nothing, and all-reduces gradients, which would round each sum once "
                "more; leave quantized out, or shard: 'shard_optim' sends as much."
            )
        object.__setattr__(self, "offload", offload_of(self.offload))
        # A list that the caller edits later must not change the plan.
        object.__setattr__(self, "units", _checked_units(self.units))
        object.__setattr__(self, "ignore", _checked_ignore(self.ignore))

    def _check_auto(self) -> None:
        if isinstance(self.memory, str):
            object.__setattr__(self, "memory", read_bytes("memory", self.memory))
        if self.memory is not None:
            check_int("memory", self.memory, least=1)
        if self.strategy != "auto":
            if self.memory is not None:
                raise ConfigError(f'memory is for strategy="auto"; strategy is {self.strategy!r}.')
        elif self.offload is not None or self.quantized is not None:
            given = "quantized" if self.offload is None else "offload"
            raise ConfigError(f'{given}: strategy="auto" chooses without it; name a strategy, or leave {given} out.')

    def _check_timeout(self) -> None:
        check_number("timeout", self.timeout, "seconds")

    @property
    def is_hybrid(self) -> bool:
        """True if there are several replicas of sharded parameters."""
        return self.strategy in ("hybrid_shard", "hybrid_shard_zero2")

    @property
    def reshards(self) -> bool:
        """True if units are resharded between forward and backward."""
        return self.strategy in ("full_shard", "hybrid_shard")


def _checked_dims(names: Any) -> tuple[str, ...] | None:
    if names is None:
        return None
    found = (names,) if isinstance(names, str) else names
    if (
        not isinstance(found, (tuple, list))
        or len(found) not in (1, 2)
        or not all(isinstance(n, str) for n in found)
        or len(set(found)) != len(found)
    ):
        raise ConfigError(
            f"mesh_dims must be the name of a dimension, two of them (replicas, shards) or None, not {names!r}."
        )
    return tuple(found)


def _checked_units(units: Any) -> Units:
    if units is None or (callable(units) and not isinstance(units, (type, nn.Module))):
        return units  # type: ignore[no-any-return]
    wanted = (
        "None, a sequence of module classes and patterns of module names, a sequence of sequences "
        "of parameter names, or a callable (module name, module) -> bool"
    )
    entries = checked_entries("units", units, wanted)
    if not entries:
        raise ConfigError("units must not be empty; None plans automatically.")
    if all(isinstance(entry, (str, type)) for entry in entries):
        return checked_modules("units", entries)
    if any(isinstance(entry, (str, type)) for entry in entries):
        raise ConfigError("units must not mix groups of names with classes and patterns.")
    return tuple(_checked_group(index, group) for index, group in enumerate(entries))


def _checked_group(index: int, group: Any) -> tuple[str, ...]:
    names = checked_entries(f"units[{index}]", group, "a sequence of parameter names")
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"units[{index}] must hold parameter names only, and at least one.")
    if len(set(names)) != len(names):
        raise ConfigError(f"units[{index}] names a parameter twice: {list(names)}.")
    return names


def _checked_ignore(ignore: Any) -> Ignored:
    entries = checked_entries("ignore", ignore, "a sequence of modules, parameters and parameter names")
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            check_pattern(f"ignore[{index}]", entry)
        elif not isinstance(entry, (nn.Module, nn.Parameter)):
            raise ConfigError(
                f"ignore[{index}] must be a module, a parameter or a glob of parameter names, "
                f"not {type(entry).__name__}."
            )
    return entries
