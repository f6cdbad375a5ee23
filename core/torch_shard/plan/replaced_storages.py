"""Which storages of a plain model's step a sharded model doesn't have, or has for a shorter time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .plan import ParamInfo
from .step_trace import (
    Allocation,
    Event,
    Free,
    GradientAccumulated,
    ModuleEnter,
    ModuleExit,
    Operator,
    Phase,
    PhaseStart,
)


class Replaced:
    """The storages in a trace of a plain model that a sharded model does not have, or not for as long.

    Attributes:
        nbytes: the bytes of each parameter that is sharded, as they are in the trace.
        absent: storages that a sharded model does not have: full parameters, and gradients that autograd clones for ``.grad``.
        handed_over: gradients that autograd hands over, and that end when they are copied.
        grad_of: the name of the parameter whose ``.grad`` a storage is in the plain model.
        standing: what is allocated in this step and is there before a later one: optimizer state, and inputs from outside.
        counted_apart: the storages of what stands, and of all else that is allocated while an optimizer steps. The replay doesn't
            take them from the step.
        optimizer_temporaries: the most bytes, at one time, of what is allocated while an optimizer steps and is no state.
        saved: pairs of a module's call and a unit's index: the backward of this call reads parameters of the unit.
    """

    def __init__(
        self, before: Sequence[Event], step: Sequence[Event], params: Mapping[str, ParamInfo], units: Mapping[str, int]
    ) -> None:
        """Read a trace.

        Args:
            before: the events before the step.
            step: the others.
            params: the parameters that are sharded, by name.
            units: the indices of their units.
        """
        self.nbytes: dict[str, int] = {}
        self.absent: set[int] = set()
        self.handed_over: set[int] = set()
        self.grad_of: dict[int, str] = {}
        self.standing: list[Allocation] = []
        self.counted_apart: set[int] = set()
        self.optimizer_temporaries = 0
        self.saved: set[tuple[int, int]] = set()
        self._params = params
        self._parameters: dict[int, str] = {}
        for event in before:
            if isinstance(event, Allocation) and event.name in params and event.kind in ("parameter", "gradient"):
                self.absent.add(event.storage)
                if event.kind == "parameter":
                    self._parameters[event.storage] = event.name
                    self.nbytes[event.name] = event.nbytes
                else:
                    self.grad_of[event.storage] = event.name
        self._find_gradients(step)
        self._find_saved(step, units)
        self._find_standing(step)
        self._find_optimizer(step)

    def _find_gradients(self, step: Sequence[Event]) -> None:
        became: set[int] = set()
        for event in step:
            if isinstance(event, Allocation) and event.kind == "gradient" and event.name in self._params:
                self.handed_over.add(event.storage)
            elif isinstance(event, GradientAccumulated) and event.parameter in self._params:
                self.grad_of[event.storage] = event.parameter
                if event.arrived == event.storage:
                    became.add(event.storage)
                elif event.storage not in became:  # a clone
                    self.absent.add(event.storage)
        self.handed_over -= self.absent

    def _find_saved(self, step: Sequence[Event], units: Mapping[str, int]) -> None:
        running: dict[int, None] = {}  # the calls whose backward runs
        for event in step:
            if isinstance(event, ModuleEnter) and event.backward:
                running[event.call] = None
            elif isinstance(event, ModuleExit) and event.backward:
                running.pop(event.call, None)
            elif isinstance(event, Operator) and event.phase == "backward" and not event.recompute:
                read = {units[self._parameters[storage]] for storage in event.inputs if storage in self._parameters}
                self.saved.update((call, unit) for call in running for unit in read)

    def _find_standing(self, step: Sequence[Event]) -> None:
        made = {storage for event in step if isinstance(event, Operator) for storage in event.outputs}
        made.update(event.storage for event in step if isinstance(event, Free))  # what ends doesn't stand, either
        for event in step:
            if isinstance(event, Allocation):
                from_outside = event.kind == "input" and event.storage not in made
                # A step may make its optimizer itself, with which the state ends.
                if from_outside or event.kind == "optimizer state":
                    self.standing.append(event)
                    self.counted_apart.add(event.storage)

    def _find_optimizer(self, step: Sequence[Event]) -> None:
        phase: Phase = "between"
        sizes: dict[int, int] = {}
        level = 0
        for event in step:
            if isinstance(event, PhaseStart):
                phase = event.phase
            elif isinstance(event, Allocation) and (phase == "optimizer" or event.kind == "optimizer state"):
                self.counted_apart.add(event.storage)
                if event.kind != "optimizer state":
                    sizes[event.storage] = event.nbytes
                    level += event.nbytes
                    self.optimizer_temporaries = max(self.optimizer_temporaries, level)
            elif isinstance(event, Free):
                level -= sizes.pop(event.storage, 0)
