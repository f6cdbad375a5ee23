"""Stepping during backward: each unit's parameters as soon as their gradients are reduced.

Gradients are gone again before those of the next but one unit arrive, so that no rank ever holds more than two units' of
them. (LOMO, arXiv 2306.09782, does so for SGD; torch's post-accumulate hooks for one optimizer per parameter.)

A unit whose values backward may need once more behind its last gradient (``x @ weight.detach().t()``, early in forward) is
stepped at the end. Every forward of a unit that backward has not come back to yet counts, as long as its graph is alive: a
fact of the program, so that ranks with one graph decide alike. What this cannot see (a checkpoint with
``use_reentrant=True`` records no forward) is noted where the unit is computed with, and at the end all ranks raise.

With offload the host thread steps, and backward goes on: what is said here of a step is when it is handed over.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, ShardError
from ..runtime import grad_scaler
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.gradient_buffer import GradientBuffer
from .checks import refuse_others
from .elementwise.step import FlatStep
from .elementwise.step_counters import part_shared
from .engines_of_optimizer import params_of
from .group_options import Options, Snapshot
from .host.step import steps_on_host
from .host.unit_step import HostUnits
from .optimizer_proxy import proxy_of

if TYPE_CHECKING:
    from ..runtime.backward_hooks import Use
    from ..runtime.runtime import Runtime
    from ..unit.unit import Unit

__all__ = ["InBackward"]

# Code that reads every gradient after backward, when there is none left, and would go on without a word.
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
        self._runtime = weakref.ref(runtime)
        self._refuse_repeated()
        grad_scaler.follow()
        step = type(optimizer).step
        self._function = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        self._host: HostUnits | None = None
        if steps_on_host(optimizer, [runtime]):
            self._host = HostUnits(optimizer)
            self._host.function = self._function
        self._followed: dict[int, FlatBuffer] = {}  # on disk: what came behind each flat buffer in the latest backward
        self._latest: FlatBuffer | None = None
        fresh = self._fresh_groups if self._host is None else self._host.fresh_groups
        self._steps: dict[int, tuple[FlatBuffer, FlatStep]] = {}
        for unit in runtime.units:
            for flat in unit.flats:
                self._steps[id(flat.gradients)] = flat, FlatStep(optimizer, runtime, flat, fresh)
        self._stepped: set[int] = set()
        self._kinds: dict[type, type] = {}
        self._options: list[Options] = []  # of the groups, as the latest backward found them
        self._fresh: list[Snapshot] = []
        self._behind: list[Options] = []  # those of the latest backward, until a step of the user's
        # By index of the unit. Forwards that backward has not come back to:
        self._expected: dict[int, weakref.WeakSet[Use]] = {}
        self._issued: dict[int, bool] = {}  # reduced in this backward; True: and not stepped yet, whatever the time
        self._gathered: set[int] = set()  # gathered once more behind that
        self._demanded: set[int] = set()  # ... because this rank computes with it
        # A forward from before may be in the next backward, and was not noted.
        self._all_at_end = bool(runtime.forward_order)
        self._inside = self._begun = False  # see `outermost`
        self._uses: dict[int, int] = {}  # of the memory of replicated units, between backwards

    @property
    def _where(self) -> str:
        runtime = self._runtime()
        return f"rank {runtime.collectives.world_rank if runtime is not None else '?'}: "

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
            raise self._refused("torch.amp.GradScaler (it has scaled this backward's loss)")
        self._refuse_repeated()
        runtime = self._runtime()
        if runtime is not None:
            refuse_others(self.optimizer, runtime, "engine.step_in_backward: ")
        if not self._begun:
            for noted in (self._stepped, self._issued, self._gathered, self._demanded):
                noted.clear()
            self._options, self._behind = [Options(group) for group in self.optimizer.param_groups], []
            part_shared(self.optimizer.state)
            if self._host is not None:
                self._host.begin(self._options)
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
        """End a backward: the last unit has been stepped.

        Raises:
            ShardError: a parameter has got a gradient behind its step.
        """
        for options in self._options:
            options.write_back()
        self._behind = self._options
        if not self._inside:
            self._all_at_end = False
        for flat, _ in self._steps.values():
            if not flat.gathers:
                self._uses[id(flat)] = _storage_uses(flat)
        with torch._C.DisableTorchFunctionSubclass():
            for number in self._stepped:
                _, work = self._steps[number]
                for p in work.held():
                    if own_grad(p) is not None:
                        raise ShardError(
                            f"{self._where}a gradient of {p._spec.name} arrived behind its step: a term of the loss uses the "
                            "parameter itself (weight decay as p.pow(2).sum(), say). Use the optimizer's weight_decay, or leave "
                            "engine.step_in_backward() out."
                        )

    def outermost(self, begins: bool) -> None:
        """Note that a call of ``torch.autograd.backward`` by the user begins or ends. All is one step inside, but may be several
        backwards to the engine: of checkpoints with ``use_reentrant=True``, where nothing of the engine's is behind them."""
        self._inside, self._begun = begins, False
        if not begins:
            self._all_at_end = False

    def _refuse_repeated(self) -> None:
        params = params_of(self.optimizer)
        if len(params) == len(set(map(id, params))):
            return
        repeated = {number for number, count in Counter(map(id, params)).items() if count > 1}
        for p in params:
            if id(p) in repeated and isinstance(p, ShardTensor):
                raise ConfigError(
                    f"{self._where}{type(self.optimizer).__qualname__} lists {p._spec.name} more than once, which "
                    "engine.step_in_backward() can't step as often; list each parameter once."
                )

    # -- options --------------------------------------------------------------------------------------------------
    def _fresh_groups(self) -> list[dict[str, Any]]:
        return [given.group for given in self._fresh]

    def groups_for(self, optimizer: Any) -> list[dict[str, Any]] | None:
        """Return what a call of ``optimizer.step()`` by the user works on; None for the optimizer's own groups.

        That call and the units' steps before it are one step, so that what an optimizer counts in its groups
        (``group["step"] += 1``) begins for it as it began for them.
        """
        groups = optimizer.param_groups
        same = len(groups) == len(self._behind) and all(
            options.group is group for options, group in zip(self._behind, groups, strict=True)
        )
        if optimizer is not self.optimizer or not same:
            return None
        self._fresh = [options.again() for options in self._behind]
        return self._fresh_groups()

    def end_step(self) -> None:
        """End a step on what :meth:`groups_for` has returned."""
        for options, given in zip(self._behind, self._fresh, strict=True):
            options.stepped(given)
            options.write_back()
        self._behind, self._fresh = [], []  # the next one is another step

    # -- when a unit is stepped -------------------------------------------------------------------------------------
    def expect(self, use: Use) -> None:
        """Note that backward may come back to a forward of a unit."""
        found = self._expected.get(use.unit.index)
        if found is None:
            found = self._expected[use.unit.index] = weakref.WeakSet()
        found.add(use)

    def reached(self, use: Use) -> None:
        """Note that backward has come back to a forward of a unit."""
        found = self._expected.get(use.unit.index)
        if found is not None:
            found.discard(use)

    def postpones(self, unit: Unit) -> bool:
        """Return True if `unit`, whose gradients are complete, is stepped at the end of backward only."""
        postponed = (
            self._all_at_end
            or bool(unit.kept)
            or len(self._expected.get(unit.index, ())) > 0
            or (not unit.gathers and self._may_be_saved(unit))
        )
        self._issued[unit.index] = postponed and self._issued.get(unit.index, True)
        return postponed

    def _may_be_saved(self, unit: Unit) -> bool:
        """Return True if autograd may have saved values of a replicated unit."""
        if not unit.collectives.counts_references:
            return True
        return any(_storage_uses(flat) > self._uses_of(flat) for flat in unit.flats)

    def _uses_of(self, flat: FlatBuffer) -> int:
        """Return how many tensors there are over a replicated unit's memory when autograd has saved none."""
        return self._uses.get(id(flat), flat.storage_baseline)

    def gathered(self, unit: Unit) -> None:
        """Note that `unit` is unsharded, by whatever rank's need."""
        if unit.index in self._issued:
            self._gathered.add(unit.index)

    def demanded(self, unit: Unit) -> None:
        """Note that this rank computes with `unit` in backward."""
        again = self._gathered if unit.gathers else self._issued
        if unit.index in again:
            self._demanded.add(unit.index)

    def marks(self) -> list[int]:
        """Return, for the end of backward, whether each unit was gathered from what may be its step's result, and whether this
        rank computes with what it has gathered. The largest of any rank counts."""
        runtime = self._runtime()
        marks: list[int] = []
        for unit in runtime.units if runtime is not None else ():
            stepped = self._issued.get(unit.index) is False
            here = self._gathered if unit.gathers else self._issued
            marks += [stepped and unit.index in here, unit.index in self._demanded]
        return marks

    def check(self, marks: Sequence[int]) -> None:
        """Raise for the `marks` of all ranks if backward computed with a unit behind its step.

        Raises:
            ShardError: on all ranks; a unit was needed once more when some rank may have stepped it.
        """
        runtime = self._runtime()
        for i, unit in enumerate(runtime.units if runtime is not None else ()):
            if all(marks[2 * i : 2 * i + 2]):
                raise ShardError(
                    f"{self._where}backward computed with {unit.names[0]} (unit {unit.name!r}) once more after its step, by a "
                    "checkpoint with use_reentrant=True, a hook, or a graph that other ranks do not have; plain torch calls "
                    "that modified by an inplace operation. Gradients may be wrong and some units have been updated: go on "
                    "from a checkpoint, with use_reentrant=False or without engine.step_in_backward()."
                )

    # -- one unit -----------------------------------------------------------------------------------------------
    def step(self, gradients: GradientBuffer) -> None:
        """Update the parameters of `gradients`, which have their ``.grad``, and let go of it."""
        flat, work = self._steps[id(gradients)]
        if id(gradients) in self._stepped:
            raise ShardError(
                f"{self._where}parameters of {flat.layout.slots[0].name}'s unit got gradients twice in one backward, so they "
                "can't be stepped during it; leave engine.step_in_backward() out."
            )
        if self._host is None:
            self._step_here(work)
        else:
            self._step_on_host(self._host, flat, work)
        self.optimizer._opt_called = True  # as far as torch's schedulers are concerned
        self._stepped.add(id(gradients))
        unit = flat.unit()
        if unit is not None:
            self._issued[unit.index] = False
        with torch._C.DisableTorchFunctionSubclass():
            held = work.held()
            for p in held:
                set_own_grad(p, None)
        if held and not flat.gathers:
            # They are the parameters: who still has one saved must hear of it.
            torch.autograd.graph.increment_version(flat.unsharded_params)

    def _step_here(self, work: FlatStep) -> None:
        self._fresh = [options.fresh() for options in self._options]
        other, session = proxy_of(self.optimizer, work, self._kinds)
        self._function(other)
        session.end()
        for options, given in zip(self._options, self._fresh, strict=True):
            options.stepped(given)
        self._fresh = []

    def _step_on_host(self, host: HostUnits, flat: FlatBuffer, work: FlatStep) -> None:
        looked = host.look(flat, work)
        if looked is None:
            return
        host.step(looked, self._followed.get(id(flat)))
        if self._latest is not None:
            self._followed[id(self._latest)] = flat
        self._latest = flat

    # -- what can't be had together ---------------------------------------------------------------------------------
    def check_reader(self) -> None:
        """Raise if who reads a ``.grad`` that is None clips or scales gradients."""
        frame: Any = sys._getframe(2)
        for _ in range(4):
            if frame is None:
                return
            name = frame.f_globals.get("__name__")
            if name in _READERS:
                raise self._refused(_READERS[name])
            frame = frame.f_back

    def _refused(self, what: str) -> ShardError:
        return ShardError(
            f"{self._where}{what} with engine.step_in_backward(): a unit's gradients are used and freed before the others' are "
            "known. Leave one of them out."
        )

    def refuse_clipping(self) -> None:
        raise self._refused("clipping gradients (engine.clip_grad_norm_, clip_grad_value_)")

    def refuse_norms(self) -> None:
        raise self._refused("norms of gradients (engine.grad_norms)")


def _storage_uses(flat: FlatBuffer) -> int:
    storage: int = torch._C._storage_Use_Count(flat.full.untyped_storage()._cdata)
    return storage
