"""Stepping during backward: each unit's parameters as soon as their gradients are reduced.

A unit's gradients are freed before those of the next but one unit arrive, so no rank ever holds the gradients of more than two
units. (LOMO, arXiv 2306.09782, does so for SGD; torch's post-accumulate hooks for one optimizer per parameter.)

A unit whose values backward may need once more after its last gradient (``x @ weight.detach().t()``, early in forward) is
stepped at the end. That is so while there is a forward of the unit that backward has not come back to, and whose graph is
alive: a fact of the program, so that ranks with one graph decide alike. A checkpoint with ``use_reentrant=True`` records no
forward. Such uses are noted where backward computes with the unit, and at the end all ranks raise.

With offload the host thread steps, and backward goes on: "stepped" then means that the step was handed over.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..errors import ShardError
from ..runtime import grad_scaler
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from ..unit.flat_buffer import FlatBuffer
from ..utils.autograd_private import storage_uses
from .checks import refuse_others, refuse_repeated
from .elementwise.step import FlatStep
from .engines_of_optimizer import params_of
from .group_options import Options
from .host.step import steps_on_host
from .host.unit_step import HostUnits
from .optimizer_proxy import proxy_of

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime
    from ..runtime.use import Use
    from ..unit.unit import Unit

# Code that reads every gradient after backward, finds none, and would go on without an error.
_READERS = {
    "torch.nn.utils.clip_grad": "clipping gradients (torch.nn.utils)",
    "torch.amp.grad_scaler": "torch.amp.GradScaler",
}


class InBackward:
    """The optimizer that steps during one engine's backwards.

    Raises:
        ConfigError: it lists a parameter more than once.
    """

    def __init__(self, optimizer: Any, runtime: Runtime) -> None:
        self.optimizer = optimizer
        self._runtime = runtime
        refuse_repeated(self.optimizer)
        grad_scaler.follow()
        step = type(optimizer).step
        self._function = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        self._host: HostUnits | None = None
        if steps_on_host(optimizer, [runtime]):
            self._host = HostUnits(optimizer)
            self._host.function = self._function
        # For each buffer, the buffer that was stepped after it in the latest backward.
        self._followed: dict[FlatBuffer, FlatBuffer] = {}
        self._latest: FlatBuffer | None = None
        self._steps = {flat: FlatStep(optimizer, runtime, flat) for flat in runtime.flats}
        self._stepped: set[FlatBuffer] = set()  # the buffers that were stepped in this backward
        self._classes: dict[type, type] = {}  # of proxies
        # The options of the groups as the latest backward has found them; empty after the user has called ``step()``.
        self._options: list[Options] = []
        # The following are kept by index of the unit.
        # The forwards that backward has not come back to.
        self._expected: defaultdict[int, weakref.WeakSet[Use]] = defaultdict(weakref.WeakSet)
        self._issued: dict[int, bool] = {}  # units reduced in this backward; True: they are stepped at its end
        self._gathered: set[int] = set()  # units gathered once more after their reduction
        self._computed_with: set[int] = set()  # those among them that this rank has computed with
        # The next backward may run through an earlier forward, which was not noted.
        self._all_at_end = bool(runtime.forward_order)
        self._inside = self._begun = False  # see `enter_call`
        self._uses: dict[FlatBuffer, int] = {}  # the use counts of the memory of replicated units, between backwards

    @property
    def _where(self) -> str:
        return f"rank {self._runtime.collectives.world_rank}: "

    # -- around a backward --------------------------------------------------------------------------------------
    def begin(self, syncing: bool) -> None:
        """Begin a backward.

        Raises:
            ShardError: under ``no_sync``, or with a GradScaler; nothing has been changed.
        """
        if not syncing:
            raise ShardError(
                f"{self._where}no_sync() with engine.step_in_backward(): each backward is a step, so nothing can be accumulated. "
                "Leave one of them out."
            )
        if grad_scaler.is_running():
            self.refuse("torch.amp.GradScaler (it has scaled this backward's loss)")
        refuse_repeated(self.optimizer)
        refuse_others(self.optimizer, self._runtime, "engine.step_in_backward: ")
        if not self._begun:
            for noted in (self._stepped, self._issued, self._gathered, self._computed_with):
                noted.clear()
            self._options = [Options(group) for group in self.optimizer.param_groups]
            if self._host is not None:
                self._host.begin()
                self._latest = None
            self._begun = self._inside
        with torch._C.DisableTorchFunctionSubclass():
            for p in params_of(self.optimizer):
                if isinstance(p, ShardTensor) and own_grad(p) is not None:
                    raise ShardError(
                        f"{self._where}{p._spec.name} has a gradient from before engine.step_in_backward(), which this "
                        "backward would step with in part. Call optimizer.step() or zero_grad() first."
                    )

    def end(self) -> None:
        """End a backward, in which the last unit has been stepped.

        Raises:
            ShardError: a parameter has got a gradient after its step.
        """
        for options in self._options:
            options.write_back()
        if not self._inside:
            self._all_at_end = False
        self._uses = {flat: storage_uses(flat.full) for flat in self._steps if not flat.gathers}
        with torch._C.DisableTorchFunctionSubclass():
            for flat in self._stepped:
                for p in self._steps[flat].stepped():
                    if own_grad(p) is not None:
                        raise ShardError(
                            f"{self._where}a gradient of {p._spec.name} arrived after its step: a term of the loss uses the "
                            "parameter itself (weight decay as p.pow(2).sum(), say). Use the optimizer's weight_decay, or leave "
                            "engine.step_in_backward() out."
                        )

    def enter_call(self) -> None:
        """Note that a call of ``torch.autograd.backward`` by the user begins.

        It is one step, but may be several backwards for the engine: checkpoints with ``use_reentrant=True`` run a backward each.
        """
        self._inside, self._begun = True, False

    def leave_call(self) -> None:
        """Note that a call of ``torch.autograd.backward`` by the user has ended."""
        self._inside = self._begun = self._all_at_end = False

    def take_back(self, optimizer: Any) -> None:
        """Undo what the latest backward has done to the options of `optimizer`, whose ``step()`` the user has called.

        That call and the units' steps before it are one step, so that what an optimizer counts in its groups
        (``group["step"] += 1``) is counted once.
        """
        if optimizer is self.optimizer:
            for options in self._options:
                options.take_back()

    def put_back(self, optimizer: Any) -> None:
        """End the step that :meth:`take_back` has begun.

        If the user's ``step()`` counted nothing, because backward had used up the gradients, the count of the backward stays.
        """
        if optimizer is self.optimizer:
            for options in self._options:
                options.put_back()
            self._options = []

    # -- when a unit is stepped -------------------------------------------------------------------------------------
    def expect(self, use: Use) -> None:
        """Note that backward may come back to a forward of a unit."""
        self._expected[use.unit.index].add(use)

    def note_reached(self, use: Use) -> None:
        """Note that backward has come back to a forward of a unit."""
        self._expected[use.unit.index].discard(use)

    def postpones(self, unit: Unit) -> bool:
        """Return True if `unit`, whose gradients are complete, is not stepped before the end of backward; note which it is."""
        postponed = (
            self._all_at_end
            or bool(unit.kept)
            or len(self._expected[unit.index]) > 0
            or (not unit.gathers and self._may_be_saved(unit))
        )
        self._issued[unit.index] = postponed and self._issued.get(unit.index, True)
        return postponed

    def _may_be_saved(self, unit: Unit) -> bool:
        """Return True if autograd may have saved values of a replicated unit."""
        if not unit.collectives.counts_references:
            return True
        # Before the first backward the engine's own references count.
        return any(storage_uses(flat.full) > self._uses.get(flat, flat.storage_baseline) for flat in unit.flats)

    def note_unsharded(self, unit: Unit) -> None:
        """Note that `unit` is unsharded, because some rank needs it."""
        if unit.index in self._issued:
            self._gathered.add(unit.index)

    def note_computed_with(self, unit: Unit) -> None:
        """Note that this rank computes with `unit` in backward."""
        unsharded = self._gathered if unit.gathers else self._issued
        if unit.index in unsharded:
            self._computed_with.add(unit.index)

    def votes(self) -> list[int]:
        """Return two votes for each unit: whether it was gathered after its step, and whether this rank then computed with it.

        At the end of backward the ranks compare their votes; the largest counts.
        """
        votes: list[int] = []
        for unit in self._runtime.units:
            stepped = self._issued.get(unit.index) is False
            here = self._gathered if unit.gathers else self._issued
            votes += [stepped and unit.index in here, unit.index in self._computed_with]
        return votes

    def check_votes(self, votes: Sequence[int]) -> None:
        """Raise if, by the `votes` of all ranks, backward has computed with a unit after its step.

        Raises:
            ShardError: on all ranks; a unit was needed once more when some rank may have stepped it.
        """
        for i, unit in enumerate(self._runtime.units):
            if all(votes[2 * i : 2 * i + 2]):
                raise ShardError(
                    f"{self._where}backward computed with {unit.names[0]} (unit {unit.name!r}) once more after its step, by a "
                    "checkpoint with use_reentrant=True, a hook, or a graph that other ranks do not have; plain torch calls "
                    "that modified by an inplace operation. Gradients may be wrong and some units have been updated: go on "
                    "from a checkpoint, with use_reentrant=False or without engine.step_in_backward()."
                )

    # -- one unit -----------------------------------------------------------------------------------------------
    def step(self, flat: FlatBuffer) -> None:
        """Update the parameters of `flat`, which have their ``.grad``, and free the gradients."""
        work = self._steps[flat]
        if flat in self._stepped:
            raise ShardError(
                f"{self._where}parameters of {flat.layout.slots[0].name}'s unit got gradients twice in one backward, so they "
                "can't be stepped during it; leave engine.step_in_backward() out."
            )
        if self._host is None:
            self._step_here(work)
        else:
            self._step_on_host(self._host, flat, work)
        self.optimizer._opt_called = True  # as far as torch's schedulers are concerned
        self._stepped.add(flat)
        unit = flat.unit()
        if unit is not None:
            self._issued[unit.index] = False
        with torch._C.DisableTorchFunctionSubclass():
            stepped = work.stepped()
            for p in stepped:
                set_own_grad(p, None)
        if stepped and not flat.gathers:
            # These are views of the updated memory: a graph that has saved one must not run any more.
            torch.autograd.graph.increment_version(flat.unsharded_params)

    def _step_here(self, work: FlatStep) -> None:
        fresh = [options.fresh() for options in self._options]
        work.given_groups = [given.group for given in fresh]
        proxy, session = proxy_of(self.optimizer, work, self._classes)
        self._function(proxy)
        session.end()
        for options, given in zip(self._options, fresh, strict=True):
            options.stepped(given)

    def _step_on_host(self, host: HostUnits, flat: FlatBuffer, work: FlatStep) -> None:
        prepared = host.prepare(flat, work)
        if prepared is None:
            return
        host.step(prepared, self._followed.get(flat))
        if self._latest is not None:
            self._followed[self._latest] = flat
        self._latest = flat

    # -- what can't be had together ---------------------------------------------------------------------------------
    def check_reader(self) -> None:
        """Raise if the reader of a ``.grad`` that is None clips or scales gradients."""
        frame: Any = sys._getframe(2)
        for _ in range(4):
            if frame is None:
                return
            name = frame.f_globals.get("__name__")
            if name in _READERS:
                self.refuse(_READERS[name])
            frame = frame.f_back

    def refuse(self, what: str) -> NoReturn:
        raise ShardError(
            f"{self._where}{what} with engine.step_in_backward(): a unit's gradients are used and freed before the others' are "
            "known. Leave one of them out."
        )
