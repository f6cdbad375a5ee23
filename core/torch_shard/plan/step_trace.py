"""What one training step does, as an ordered record: memory, operators, modules, gradients and collectives.

It holds no tensor and no module. :func:`torch_shard.plan.trace_step.trace_step` makes one of a plain model on one device, and
:func:`torch_shard.plan.sharded_step.sharded_step` one of a rank of the sharded model from that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

Kind: TypeAlias = Literal[
    "parameter", "gradient", "optimizer state", "buffer", "input", "gathered", "reduction", "activation", "temporary"
]
Phase: TypeAlias = Literal["forward", "backward", "optimizer", "between"]
Stream: TypeAlias = Literal["compute", "gather", "reduce"]
Transfer: TypeAlias = Literal["all_gather", "reduce_scatter", "all_reduce", "to_device", "to_host"]

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage came to be.

    A storage has one kind from its allocation to its end, which is known when the step is over:

    - ``parameter`` and ``buffer``: of the model, allocated before the step. Plain tensors that are attributes of modules count
      as buffers.
    - ``input``: read by the step and made outside of it, or made between the phases and alive when the next forward starts.
    - ``activation``: made in forward, or while a checkpoint recomputes, and alive when that ends. This includes all that
      autograd has saved.
    - ``gradient``: accumulated into the ``.grad`` of a parameter, or became it.
    - ``optimizer state``: in the ``state`` of a ``torch.optim.Optimizer`` after its step.
    - ``temporary``: all else.

    Of a sharded model, parameters, gradients and optimizer state are the rank's shards, and there are two kinds more:

    - ``gathered``: the full parameters of a unit.
    - ``reduction``: full gradients of a unit, until they are reduced, and what receives their sums.

    Attributes:
        storage: the storage's number, unique within the trace. A storage that is resized gets another number.
        nbytes: its bytes, as asked of the allocator: allocators of devices round them up.
        device: the type of its device, such as ``"cpu"``.
        kind: what it holds.
        name: the full name of the parameter or buffer; of the parameter for a gradient; of the unit for shards, ``gathered`` and
            ``reduction``. Empty for the rest.
        stream: the stream that it is allocated on, where the device has streams.
    """

    storage: int
    nbytes: int
    device: str
    kind: Kind
    name: str = ""
    stream: Stream = "compute"


@dataclass(frozen=True, slots=True)
class Free:
    """A storage ended: nothing refers to it any longer.

    Attributes:
        storage: the number that its allocation had.
    """

    storage: int


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator ran. Views, which touch no memory, are left out. Its outputs are allocated before it in the order of events.

    Attributes:
        name: its name with the overload, such as ``"aten.mm.default"``.
        phase: the phase in which it ran.
        recompute: True if it ran while a checkpoint recomputed a forward inside backward.
        module: the full name of the innermost module whose forward or backward this is, ``""`` for the model itself; None
            outside of the model.
        dtype: the dtype of the first floating-point tensor that it takes, else of the first that it returns; None for others.
        flops: floating-point operations of matrix products and convolutions, two for a multiplication with addition, by the
            formulas of ``torch.utils.flop_counter``; 0 for all others.
        read: the bytes of the tensors that it reads.
        written: the bytes of the tensors that it writes.
        workspace: the bytes that its kernel allocates for itself and frees again, where that is known.
        inputs: the numbers of the storages that it takes, each once.
        outputs: the numbers of the storages that it writes, each once.
    """

    name: str
    phase: Phase
    recompute: bool
    module: str | None
    dtype: torch.dtype | None
    flops: int
    read: int
    written: int
    workspace: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModuleEnter:
    """A module's forward or backward begins.

    In backward this comes before the first operator that belongs to the module: autograd's nodes tell which were made inside its
    forward. The event of an enclosing module comes earlier.

    Attributes:
        module: the full name; ``""`` for the model itself.
        call: the number of the call of a forward, unique within the trace; in backward, the call whose backward this is.
        backward: True for a backward.
        recompute: True for a forward that runs inside a backward, for a checkpoint.
        records: True if autograd records the forward, or has recorded the one whose backward this is.
    """

    module: str
    call: int
    backward: bool
    recompute: bool
    records: bool = True


@dataclass(frozen=True, slots=True)
class ModuleExit:
    """A module's forward or backward has ended, in backward with its last operator or gradient.

    Backwards are nested like forwards, except that those of neighbours may overlap where autograd interleaves branches.

    Attributes:
        module, call, backward, recompute: those of its :class:`ModuleEnter`.
    """

    module: str
    call: int
    backward: bool
    recompute: bool


@dataclass(frozen=True, slots=True)
class GradientAccumulated:
    """A gradient of a parameter has been accumulated into its ``.grad``.

    Attributes:
        parameter: the full name.
        arrived: the number of the storage that autograd has handed over. Where it became ``.grad`` itself, that is `storage`.
        storage: the number of the storage of ``.grad`` after that.
    """

    parameter: str
    arrived: int
    storage: int


@dataclass(frozen=True, slots=True)
class GradientsCleared:
    """``zero_grad()`` of an optimizer or a module has set gradients to None, whether or not there were any.

    Attributes:
        parameters: the full names of the parameters.
    """

    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CollectiveStart:
    """A collective, or a copy between the host and the device, was issued, in a sharded model.

    Attributes:
        number: its number, unique within the trace.
        kind: which collective it is, or in which direction the copy goes.
        unit: the name of the unit whose parameters or gradients it has; ``""`` for an activation.
        nbytes: the bytes of the whole, as :func:`torch_shard.plan.roofline.collective_seconds` takes them; or those copied.
        ranks: the ranks of its group.
        stride: how many ranks lie from one of the group to the next: more than one between replicas.
    """

    number: int
    kind: Transfer
    unit: str
    nbytes: int
    ranks: int = 1
    stride: int = 1


@dataclass(frozen=True, slots=True)
class CollectiveWait:
    """What follows waits for a collective.

    Attributes:
        number: the number that it was issued with.
    """

    number: int


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """The host begins an optimizer's step on the shards of a unit, beside what the device does.

    Attributes:
        unit: the name of the unit.
        nbytes: the bytes of host memory that the step reads and writes.
    """

    unit: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class NestedBackward:
    """A backward inside a backward begins or ends, such as reentrant checkpointing runs one for each layer.

    Attributes:
        begins: False where it ends.
    """

    begins: bool


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """A phase begins, which lasts until the next of these.

    ``forward`` goes from the first forward of a module to the start of backward, so that the loss belongs to it; ``backward``
    to the end of autograd's work; ``optimizer`` is the step of a ``torch.optim.Optimizer``. What is left is ``between``, as the
    trace itself starts: making inputs, clipping, ``zero_grad()``.

    Attributes:
        phase: the phase.
    """

    phase: Phase


Event: TypeAlias = (
    Allocation
    | Free
    | Operator
    | ModuleEnter
    | ModuleExit
    | GradientAccumulated
    | GradientsCleared
    | NestedBackward
    | PhaseStart
    | CollectiveStart
    | CollectiveWait
    | HostUpdate
)


@dataclass(frozen=True, slots=True)
class Note:
    """The step asked for a value, which a trace does not have, and went on with an assumed one.

    Attributes:
        operator: the operator that asked, such as ``"aten._local_scalar_dense.default"``, which is ``tensor.item()``.
        line: the line of the user's code, ``path:line in function``.
        value: what it was told.
    """

    operator: str
    line: str
    value: bool | int | float


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment at which a step holds most memory.

    Attributes:
        index: the index of the event after which the moment is; if that is an operator with a workspace, the moment is while
            it runs.
        total: the bytes.
        kinds: the bytes of each kind, all kinds of :data:`KINDS`.
    """

    index: int
    total: int
    kinds: dict[Kind, int]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One training step.

    Attributes:
        device: the type of the device that the model was on.
        events: what happened, in order. What was there before comes first, as allocations.
        notes: each read of a value that was answered by a constant, in order. If the program's way depends on one, the trace
            shows one of the ways.
    """

    device: str
    events: tuple[Event, ...]
    notes: tuple[Note, ...] = ()

    def memory(self, device: str | None = None) -> list[tuple[int, dict[Kind, int]]]:
        """Return the bytes by kind after each event that changes them, as pairs of the event's index and all kinds.

        An operator with a workspace has a pair of its own, with the workspace as ``temporary``, which the next pair no longer
        includes.

        Args:
            device: the type of the device whose memory is meant; the trace's own if left out.
        """
        return [(index, dict(zip(KINDS, levels, strict=True))) for index, levels in self._levels(device)]

    def peak(self, device: str | None = None, kinds: Iterable[Kind] = KINDS) -> Peak:
        """Return the first moment with the most bytes of some kinds; `device` as for :meth:`memory`."""
        index, levels = 0, [0] * len(KINDS)
        counted = [KINDS.index(kind) for kind in kinds]
        most = 0
        for at, now in self._levels(device):
            total = sum(now[place] for place in counted)
            if total > most:
                index, levels, most = at, list(now), total
        return Peak(index, most, dict(zip(KINDS, levels, strict=True)))

    def _levels(self, device: str | None) -> Iterator[tuple[int, list[int]]]:
        """Yield what :meth:`memory` returns with the bytes in the order of `KINDS`, in one list that changes."""
        device = self.device if device is None else device
        place = {kind: number for number, kind in enumerate(KINDS)}
        temporary = place["temporary"]
        alive: dict[int, Allocation] = {}
        levels = [0] * len(KINDS)
        for index, event in enumerate(self.events):
            if isinstance(event, Allocation):
                if event.device == device:
                    alive[event.storage] = event
                    levels[place[event.kind]] += event.nbytes
                    yield index, levels
            elif isinstance(event, Free):
                ended = alive.pop(event.storage, None)
                if ended is not None:
                    levels[place[ended.kind]] -= ended.nbytes
                    yield index, levels
            elif isinstance(event, Operator) and event.workspace and device == self.device:
                levels[temporary] += event.workspace
                yield index, levels
                levels[temporary] -= event.workspace
