"""Parameters used outside their modules' forward, which `ShardTensor.__torch_function__` has unsharded for one operation."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm.work import caller_line
from ..errors import DivergenceError, UnitStateError
from ..schedule.unit_state import State
from ..shard_tensor.function_call import FunctionCall
from ..shard_tensor.function_sets import SCALARS, creates, exposes_memory, initialises
from ..shard_tensor.spec import gather_error
from ..shard_tensor.tensor import ShardTensor
from ..unit.full_values import full_flat
from ..unit.shard_reads import read_parameter
from ..utils import transforms
from ..utils.autograd_private import graph_task, sequence_number
from ..utils.pytree import tensors_in
from .use import Use

if TYPE_CHECKING:
    from ..unit.flat_buffer import FlatBuffer
    from ..unit.unit import Unit
    from .runtime import Runtime


@dataclass(eq=False)
class _Stored:
    """A parameter that was unsharded with its stored values, for one operation."""

    flat: FlatBuffer
    index: int
    full: torch.Tensor
    edits: bool = False
    alone: bool = False  # read by this rank alone

    def write_back(self) -> None:
        """Write to the shard what an in-place function has changed."""
        start, stop = self.flat.layout.local_range(self.index, self.flat.collectives.rank)
        before = self.flat.shard[start:stop]
        now = self.flat.own_slot(self.full)[start:stop].to(before.device)
        if not torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
            with torch.no_grad():
                before.copy_(now)


class OnDemand:
    """Decides between the shard and the unsharded parameter; one for each sharded model."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._uses: list[Use | _Stored] = []  # of the running operations, the innermost last
        # Copies that stand for views, each with its version, the parameter's name and the caller's line. Edits would be lost.
        self._copies: list[tuple[torch.Tensor, int, str, str]] = []

    def begin(
        self,
        unit: Unit,
        param: ShardTensor,
        call: FunctionCall,
        local_ok: bool,
        dtypes: frozenset[torch.dtype],
    ) -> torch.Tensor | None:
        """Return what the function of `call` computes with in place of `param`, usually the unsharded parameter.

        None for the shards. Collective where the unit is not unsharded yet.

        Args:
            unit: the unit that holds `param`.
            param: an operand.
            call: the operation.
            local_ok: the operation gives the right result on shards, too.
            dtypes: the dtypes of the operands that are not sharded.
        """
        try:
            if transforms.running() is not None:
                return transforms.outside(self._begin, unit, param, call, local_ok, dtypes)
            return self._begin(unit, param, call, local_ok, dtypes)
        except BaseException:
            if not self.runtime.forwards.running:
                self.runtime.session.end_read()
            raise

    def _begin(
        self, unit: Unit, param: ShardTensor, call: FunctionCall, local_ok: bool, dtypes: frozenset[torch.dtype]
    ) -> torch.Tensor | None:
        self.check_copies()
        if unit.is_summoned:
            return unit.unsharded_param_of(param)
        runtime = self.runtime
        if runtime.forwards.depth:
            runtime.forwards.leave_interrupted()
        inside, recording = runtime.forwards.running, torch.is_grad_enabled()
        name, edits = getattr(call.func, "__name__", ""), call.target is param
        # Without gradients the shards will do, unless the unit's own forward runs: that computes with the unsharded
        # parameter, which has to be edited itself.
        if local_ok and not recording and not unit.installed:
            return None if edits else self._scalar(unit, param, call, recording=False)
        # Before and after a forward the unit is resharded as soon as the function has returned, so that an address of the
        # unsharded parameter must not be handed out.
        if not unit.installed and not inside and exposes_memory(name):
            return None
        differentiable = recording and param.requires_grad and not creates(name) and not initialises(name)
        # Users' hooks see one full gradient: it must not arrive in two parts, at the unsharded parameter and at the shard.
        hooked = differentiable and bool(unit.unsharded_param_of(param)._backward_hooks)
        # The gradient of a replicated parameter is averaged over the replicas if it arrives at the unsharded parameter. Most
        # of these parameters need no unshard.
        averaged = unit.collectives.topology.replicas > 1
        replicated = differentiable and (averaged or not (unit.sharded or unit.gathers))
        if local_ok and not (inside or hooked or replicated):
            return None if edits else self._scalar(unit, param, call, differentiable)
        if not runtime.is_ready:
            # Set-up lets a model on meta initialise shards, and full parameters where this error is raised.
            raise gather_error(param, name)
        flat, index = unit.find(param)
        # Outside a forward a parameter shows its stored dtype. An operation is part of the model's computation only if another
        # operand has the dtype of that (`F.linear(features, model.head.weight)`). If both dtypes are one, an operation is
        # part of it that records a gradient.
        as_stored = not flat.exact and not inside and graph_task() == -1
        as_stored &= not flat.casts or flat.compute not in dtypes
        if as_stored and not differentiable:
            return self._stored(unit, flat, index, edits)
        start = sequence_number()
        is_there = replicated and not unit.gathers
        at_hand = local_ok and ((is_there and not inside) or (unit.installed and not recording))
        if not (at_hand or (not inside and not recording and self._is_unsharded(unit, param))):
            reads = None if inside else not edits
            runtime.unshard(unit, runtime.phase(), f"{name} of {param._spec.name}", reads)
            if reads and recording and runtime.lone.running:
                return self._read_alone(flat, index, recording)
        if runtime.recomputes and not unit.installed and (unit.uses or not unit.gathers):
            unit.begin_recomputation()  # the operations that follow find the unsharded parameters in the modules
        for each in unit.flats:
            each.mirror()
            if not unit.installed:
                each.note_versions()
        unit.running += 1
        self._uses.append(Use(unit, start))
        return flat.unsharded_params[index].to(flat.dtype) if as_stored else flat.unsharded_params[index]

    def _stored(self, unit: Unit, flat: FlatBuffer, index: int, edits: bool) -> torch.Tensor:
        """Return the unsharded parameter with its stored values, where modules compute with others. Collective."""
        text = f"gathers the stored values of unit {unit.name!r} with {flat.layout.slots[0].name}"
        note = zlib.crc32(text.encode()), text
        if edits:
            self.runtime.lone.refuse(f"an edit of {flat.layout.slots[index].name}")
            self.runtime.operations.note(*note)
            self.runtime.operations.check(text)
        elif self.runtime.meet(text, [note]) is None:
            return self._read_alone(flat, index, recording=False)
        full = full_flat(flat, unit.gather_text)
        if full is flat.shard:
            full = full.clone()
        self._uses.append(_Stored(flat, index, full, edits))
        return flat.parameter_over(flat.view(full, index), index)

    @contextlib.contextmanager
    def alone(
        self, unit: Unit, what: str, recipe: int, recording: bool, known: bool
    ) -> Iterator[Callable[[ShardTensor], torch.Tensor] | None]:
        """Return a context in which this rank alone reads parameters of the model; see :func:`.derivation.reading`.

        It yields a function that returns a parameter's full stored values, in new memory, or None where all ranks read.
        """
        with self.runtime.lone.until_end():
            lone = self._is_lone(unit, what, recipe, recording, known)
            yield (lambda param: self._read_parameter(param, recording)) if lone else None

    @contextlib.contextmanager
    def alone_for_file(self, what: str) -> Iterator[Callable[[ShardTensor], torch.Tensor] | None]:
        """Return a context as :meth:`alone` does, for a file that this rank writes, whatever the others do. Not collective.

        It yields None where reads alone are switched off, or a parameter is a DTensor, too.
        """
        with self.runtime.lone.alone(what) as reading:
            may_read = reading is not None or self.runtime.collectives.world == 1
            yield (lambda param: self._read_parameter(param, recording=False)) if may_read else None

    def _read_parameter(self, param: ShardTensor, recording: bool) -> torch.Tensor:
        unit: Any = param._unit
        flat, index = unit.find(param)
        full = read_parameter(flat, index, self.runtime.reading)
        return self._without_backward(full, flat, index) if recording and param.requires_grad else full

    def _scalar(self, unit: Unit, param: ShardTensor, call: FunctionCall, recording: bool) -> torch.Tensor | None:
        """Return the full parameter for a reduction to a scalar that this rank alone computes.

        Returns None where all ranks compute it, on their shards, and for any other function.
        """
        text = f"{call.name} of {param._spec.name}"
        if call.name not in SCALARS or not self._is_lone(unit, text, call.recipe, recording):
            return None
        flat, index = unit.find(param)
        return self._read_alone(flat, index, recording)

    def _is_lone(self, unit: Unit, text: str, recipe: int, recording: bool, known: bool = True) -> bool:
        """Return True if this rank alone makes a small read, which `text` describes. Collective otherwise.

        `recipe`: see :attr:`.FunctionCall.recipe`; ranks that read together must have the same. `known`: False if this rank can't
        read the values alone, so that it is an error if the others do something else.
        """
        runtime = self.runtime
        if not (unit.sharded and runtime.is_ready) or graph_task() != -1:
            return False
        if runtime.forwards.running and not runtime.lone.running:
            return False  # all ranks run this forward
        noted = f"{text} [{recipe:08x}]"
        return runtime.meet(text, [(zlib.crc32(noted.encode()), noted)], sure=recording, alone=known) is None

    def _read_alone(self, flat: FlatBuffer, index: int, recording: bool) -> torch.Tensor:
        """Return the full parameter with its stored values, which this rank reads alone; for a graph if `recording`."""
        assert self.runtime.reading is not None
        full = read_parameter(flat, index, self.runtime.reading)
        self._uses.append(_Stored(flat, index, full, alone=True))
        param = flat.parameter_over(full, index)
        return self._without_backward(param, flat, index) if recording else param

    def _without_backward(self, full: torch.Tensor, flat: FlatBuffer, index: int) -> torch.Tensor:
        """Return a full parameter that this rank alone has read, for a graph through which no backward may go."""
        name, where = flat.layout.slots[index].name, f"rank {self.runtime.collectives.world_rank}"
        line = caller_line()

        def refuse(grad: torch.Tensor) -> None:
            watchdog = self.runtime.collectives.watchdog
            other = 1 if watchdog.rank == 0 else 0
            raise DivergenceError(
                f"{where}: a backward reached {name} as this rank alone has read it at {line}, while the other ranks were "
                f"elsewhere (rank {other} {watchdog.place_of(other) or 'has ended'}); such a gradient can't be averaged. Read it "
                "under torch.no_grad(), or on every rank."
            )

        full.requires_grad_().register_hook(refuse)
        return full

    def _is_unsharded(self, unit: Unit, param: ShardTensor) -> bool:
        """Return True if an operation that records nothing, outside any forward, finds the unit unsharded. Not collective.

        In backward a unit may be unsharded when a hook of its module computes with a weight. An event of its own would only
        disturb the order of unshards that the ranks share.
        """
        if not unit.gathers:
            return True
        if graph_task() == -1 or unit.state is State.SHARDED or unit.refill:  # in a refill other ranks may unshard
            return False
        unit.wait()
        if unit.is_stale():  # it can't be unsharded anew, because its backward needs the values that forward had
            raise UnitStateError(
                f"rank {self.runtime.collectives.world_rank}: {param._spec.name} is used during backward, after unit "
                f"{unit.name!r} was changed in the same backward (by an optimizer in a hook, perhaps). Use it before the "
                "change, or after backward."
            )
        return True

    def end(self, unit: Unit, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """End the operation for which :meth:`begin` was called, also when it has raised.

        Args:
            unit: the unit that :meth:`begin` was given.
            result: the operation's result; None if it has raised.
            copies: tensors in `result` that stand for views of unsharded parameters.
            name: the names of the parameters.
        """
        # Plain torch refuses an in-place edit of a view of a parameter that records gradients.
        self.watch_copies([c for c in copies if not c.requires_grad], name)
        if unit.is_summoned or not self._uses:
            return
        if transforms.running() is not None:
            transforms.outside(self._end, result)
        else:
            self._end(result)

    def _end(self, result: Any) -> None:
        use = self._uses.pop()
        if isinstance(use, _Stored):
            if use.alone:
                if not self._uses:
                    self.runtime.forwards.between(False)
                return
            use.write_back()
            if use.edits:
                self.runtime.versions.note_change()
            return
        unit = use.unit
        unit.running -= 1
        if unit.gathers and not unit.installed:
            unit.write_back_edits()  # an in-place function may have written to the unsharded parameters
        tensors = tensors_in(result)
        recorded = torch.is_grad_enabled() and any(t.requires_grad for t in transforms.at_all_levels(tensors))
        if recorded:
            self.runtime.backwards.watch_outputs(use, tensors, forward=False)
        self.runtime.forwards.between(recorded)

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        """Make it an error to edit one of `copies`, which stand for views of `name`."""
        if copies:
            line = caller_line()
            # A detached tensor keeps no graph alive, and shares the version.
            self._copies += [(c.detach(), c._version, name, line) for c in copies]

    def check_copies(self) -> None:
        """Raise if a copy that stands for a view was edited."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        for copy, version, name, line in copies:
            if copy._version != version:
                raise UnitStateError(
                    f"rank {self.runtime.collectives.world_rank}: a view of {name}, taken at {line}, was "
                    "edited. It is a copy, because the gathered memory is released, so the edit would be lost. Edit the "
                    "parameter itself (weight.mul_(mask)), or the view inside "
                    f"{self.runtime.collectives.watchdog.handle}.gathered(write=True) between steps."
                )
