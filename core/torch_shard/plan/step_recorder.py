"""Writes down what a step on fake tensors does, as it happens.

Torch does likewise in ``torch.distributed._tools.mem_tracker``: a dispatch mode sees every operator.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependent
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import TraceError
from ..utils.autograd_private import graph_task
from .fake_model import FakeModel
from .module_calls import ModuleCalls
from .operator_costs import (
    changed_by,
    dtype_of,
    flops_of,
    nbytes_of,
    overwrites,
    size_hidden_results,
    tensors_in,
    workspace_of,
)
from .step_trace import (
    Allocation,
    Event,
    GradientAccumulated,
    GradientsCleared,
    Kind,
    ModuleEnter,
    NestedBackward,
    Note,
    Operator,
    Phase,
    PhaseStart,
    StepTrace,
)
from .storages import Segment, Storage, Storages
from .user_lines import INSIDE, Failure, line_of

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
# They take real tensors on purpose: FakeTensorMode remembers the values of small constants.
_LIFTS = {_aten.lift_fresh.default, _aten.lift_fresh_copy.default}
_FEW_ZEROS = 16 << 20  # bytes


class Recorder(TorchDispatchMode):
    """A dispatch mode that sees every operator of a step, and writes down as events what happens.

    Attributes:
        storages: the storages that are alive.
        failure: the operator that failed last, if one has.
    """

    _running: ClassVar[Recorder | None] = None

    def __init__(
        self, model: nn.Module, fakes: FakeModel, mode: FakeTensorMode, device: str, all_on_device: bool = False
    ):
        super().__init__()
        self._fakes = fakes
        self._fake_mode = mode
        self._device = device
        self._all_on_device = all_on_device
        self._events: list[Event | Storage] = []  # an allocation's kind is known at the end only
        self._notes: list[Note] = []
        self._calls = ModuleCalls(model, self._events)
        self._segments = [Segment("between", False)]
        self.storages = Storages(self._events, self._segments, device)
        self._forward_open = False
        self._stepping = 0
        self._hooks_of_parameters = ExitStack()
        self._tasks: list[int] = []  # autograd's graph tasks that run, the innermost last
        self._arrived: dict[str, int] = {}
        self._inputs = WeakIdKeyDictionary()  # the fakes of real tensors from outside the step, while these live
        self.failure: Failure | None = None

    # -- begin and end ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Write down what is there before the step."""
        for kind, name, fake, place in self._fakes.named:
            record = self.storages.of(fake, place)
            if record.kind is None:
                record.kind, record.name = kind, name
        for name, parameter in self._fakes.parameters.items():
            if parameter.requires_grad:
                arrives, accumulated = partial(self._gradient_arrives, name), partial(self._gradient_accumulated, name)
                self._hooks_of_parameters.enter_context(parameter.register_hook(arrives))
                self._hooks_of_parameters.enter_context(parameter.register_post_accumulate_grad_hook(accumulated))
        self._events.append(PhaseStart("between"))

    def restart(self) -> None:
        """Forget what has happened, outside of all modules; what is allocated now is there from the beginning."""
        self._events.clear()
        self._calls.clear()
        self._segments[:] = [Segment("between", False)]
        self._forward_open = False
        self.storages.restart()
        self._events.append(PhaseStart("between"))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Have all modules and optimizers report, while this lasts."""
        with (
            # They would be part of a cycle that Python can't see, and keep the model alive.
            self._hooks_of_parameters,
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._exit, always_call=True),
            torch_optimizer.register_optimizer_step_pre_hook(self._step_begins),
            torch_optimizer.register_optimizer_step_post_hook(self._step_ends),
        ):
            Recorder._running = self
            try:
                yield
            finally:
                Recorder._running = None

    @classmethod
    def running(cls) -> Recorder:
        """Return the recorder whose :meth:`hooks` are in force."""
        assert cls._running is not None
        return cls._running

    def add(self, event: Event) -> None:
        """Write down what no operator shows."""
        self._events.append(event)

    def finish(self) -> StepTrace:
        """Return the trace, and stop following storages."""
        self.storages.finish()
        exits = self._calls.ends_of_backwards()
        events: list[Event] = []
        for index, event in enumerate(self._events):
            if isinstance(event, Storage):
                kind = self._kind(event)
                events.append(Allocation(event.number, event.nbytes, event.device, kind, event.name))
            else:
                events.append(event)
            events += exits.get(index, ())
        return StepTrace(self._device, tuple(events), tuple(self._notes))

    def _kind(self, record: Storage) -> Kind:
        if record.kind is not None:
            return record.kind
        segment = self._segments[record.segment]
        if segment.end is None or record.died is not None and record.died < segment.end:
            return "temporary"
        if segment.phase == "forward" or segment.recompute:
            return "activation"
        following = self._segments[record.segment + 1].phase
        return "input" if segment.phase == "between" and following == "forward" else "temporary"

    # -- phases and modules -------------------------------------------------------------------------------------------

    def _segment(self) -> Segment:
        """Return the segment of what happens now; a phase that begins is written down."""
        phase: Phase = "forward" if self._forward_open else "between"
        recompute = False
        task = graph_task()
        if task != (self._tasks[-1] if self._tasks else -1):
            self._change_task(task)
        if self._stepping:
            phase = "optimizer"
        elif task != -1:
            phase = "backward"
            recompute = self._calls.recomputes or torch.is_grad_enabled()
        if phase in ("backward", "optimizer"):
            self._forward_open = self._calls.in_forward
        now = self._segments[-1]
        if (now.phase, now.recompute) != (phase, recompute):
            now.end = len(self._events)
            if now.phase != phase:
                self._calls.leave_backward()
                self._events.append(PhaseStart(phase))
            now = Segment(phase, recompute)
            self._segments.append(now)
        return now

    def _change_task(self, task: int) -> None:
        """Write down that nested backwards begin or end."""
        if task == -1 or task in self._tasks:
            while self._tasks and self._tasks[-1] != task:
                self._tasks.pop()
                if self._tasks:
                    self._events.append(NestedBackward(False))
            return
        if self._tasks:
            self._events.append(NestedBackward(True))
        self._tasks.append(task)

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self._calls.knows(module):
            return
        in_backward = graph_task() != -1
        if not in_backward and not self._stepping:
            self._forward_open = True
        self._segment()
        call = self._calls.begin(module, in_backward)
        self._segment()  # that of the call, which may recompute
        self._events.append(ModuleEnter(call.module, call.number, False, in_backward, torch.is_grad_enabled()))

    def _exit(self, module: nn.Module, args: object, output: object) -> None:
        if self._calls.knows(module):
            self._calls.end(module)

    # -- gradients and optimizers -------------------------------------------------------------------------------------

    def _gradient_arrives(self, name: str, gradient: torch.Tensor) -> None:
        record = self.storages.of(gradient)
        self._arrived[name] = record.number
        if record.kind is None and self._segments[record.segment].phase == "backward":
            record.kind, record.name = "gradient", name

    def _gradient_accumulated(self, name: str, parameter: torch.Tensor) -> None:
        self._segment()
        self._calls.follow_backward()
        gradient = parameter.grad
        if gradient is None:
            return  # a hook of the user's has taken it
        record = self.storages.of(gradient)
        record.kind, record.name = "gradient", name
        self._events.append(GradientAccumulated(name, self._arrived.pop(name, record.number), record.number))
        self._calls.extend_backward()

    @property
    def in_step(self) -> bool:
        """True inside an optimizer's step, but for its closure."""
        return self._stepping > 0

    def gradients_cleared(self, parameters: Iterable[torch.Tensor]) -> None:
        """Write down that ``zero_grad()`` is about to set the gradients of `parameters` to None."""
        names = self._fakes.names
        found = tuple(names[id(parameter)] for parameter in parameters if id(parameter) in names)
        self._segment()
        if found:
            self._events.append(GradientsCleared(found))

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        for group in optimizer.param_groups:
            if any(self._fakes.known(parameter) for parameter in group["params"]):
                raise TraceError(
                    f"the {type(optimizer).__name__} that steps at {line_of(sys._getframe())} was made before the trace and "
                    "holds the model's own parameters: name it in trace_step(optimizers=...)."
                )
        self._stepping += 1
        return tuple(map(self._outside_step, args)), {name: self._outside_step(v) for name, v in kwargs.items()}

    def _outside_step(self, value: Any) -> Any:
        """Return what an optimizer's step is called with; a closure, which computes the loss, is not part of the step."""
        if not callable(value):
            return value

        def closure() -> Any:
            stepping, self._stepping = self._stepping, 0
            try:
                return value()
            finally:
                self._stepping = stepping

        return closure

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, FakeTensor):
                    record = self.storages.of(value)
                    record.kind, record.name = "optimizer state", self._fakes.names.get(id(parameter), "")
        self._stepping -= 1

    # -- what is allocated, and tensors from outside -------------------------------------------------------------------

    def _place(self, asked: torch.device | None, inputs: Iterable[Storage], segment: Segment) -> str:
        """Return the type of the device for what an operator allocates, where fakes of the CPU stand for others.

        Inside the model the program takes the device from tensors, all of which say that they are on the CPU.
        """
        if self._device == "cpu":
            return self._device
        if self.storages.placing_on is not None:
            return self.storages.placing_on
        if self._all_on_device:
            return self._device
        if asked is not None and asked.type != "cpu":
            return asked.type
        if any(record.device != "cpu" for record in inputs):
            return self._device
        inside = self._calls.running is not None or segment.phase == "backward"
        return self._device if inside and asked is not None else "cpu"

    def _adopted(self, value: Any) -> Any:
        """Return a fake for a real tensor that comes from outside the step, and keep it while the real one lives."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._adopted(entry) for entry in value)
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        if self._fakes.known(value):
            raise TraceError(
                f"a parameter or buffer of the model is used at {line_of(sys._getframe())} as an object that was taken from it "
                "before the trace: take it from the model inside the step."
            )
        fake: FakeTensor | None = self._inputs.get(value)
        if fake is None:
            place = self._device if value.is_meta or self._all_on_device else value.device.type
            if value.device.type == "cpu":
                fake = self._fake_mode.from_tensor(value)
            else:
                shadow = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
                fake = FakeTensor(self._fake_mode, shadow, torch.device("cpu"))
            self._inputs[value] = fake
            self.storages.of(fake, place).kind = "input"
        return fake

    # -- operators ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator on fake tensors and write it down."""
        kwargs = {} if kwargs is None else kwargs
        if func is _DEVICE:
            return args[0].fake_device  # asked by autograd, all the time
        if self._all_on_device and self._is_of_host((args, kwargs)):
            with _disable_current_modes():
                return func(*args, **kwargs)
        segment = self._segment()
        if func not in _LIFTS and not all(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            args = self._adopted(args)
            kwargs = {key: self._adopted(value) for key, value in kwargs.items()}
        asked = kwargs.get("device")
        # Autograd could end the process for a tensor on another device.
        if asked is not None and asked.type not in ("cpu", "meta", self._device):
            raise TraceError(
                f"a tensor is put on {asked} at {line_of(sys._getframe(1))}: the trace is for {self._device}."
            )
        if asked is not None and asked.type != "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}  # without a number, which a fake would keep
        try:
            output = self._run(func, args, kwargs)
        except DataDependent:
            return self._assumed(func, args)
        except Exception as error:
            self.failure = Failure(str(func), line_of(sys._getframe(1)), error)
            raise
        if self._device == "cpu":
            size_hidden_results(func, args, output)
        self._write_down(func, args, kwargs, output, segment, asked)
        return output

    def _is_of_host(self, taken: Any) -> bool:
        """Return True for an operator of a script that is not the model's business, so that it can have true values."""
        if self._calls.running is not None or self._stepping or graph_task() != -1:
            return False
        return not any(isinstance(t, (FakeTensor, nn.Parameter)) for t in tensors_in(taken))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)
        except UnsupportedOperatorException:
            # It has no rule for fakes. Torch would run the kernel itself, on zeros: fine as long as they are few.
            if nbytes_of(t for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)) > _FEW_ZEROS:
                raise
        self._fake_mode.allow_fallback_kernels = True
        try:
            return func(*args, **kwargs)
        finally:
            self._fake_mode.allow_fallback_kernels = False

    def _write_down(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        segment: Segment,
        asked: torch.device | None,
    ) -> None:
        """Write down an operator that has run."""
        taken = [t for t in tensors_in((args, kwargs)) if isinstance(t, FakeTensor)]
        changed = [id(t) for t in changed_by(func, args, kwargs)]
        before = {t.untyped_storage()._cdata for t in taken}
        returned = list(tensors_in(output))
        fresh = [t for t in returned if t.untyped_storage()._cdata not in before]
        if not changed and not fresh:
            return  # a view, or something that returns no tensor
        if segment.phase == "backward":
            self._calls.follow_backward()
        reads = [t for t in taken if not (id(t) in changed and overwrites(func))]
        inputs = {self.storages.of(t): None for t in taken}
        writes = [*fresh, *(t for t in taken if id(t) in changed)]
        place = self._place(asked, inputs, segment)
        outputs = {self.storages.of(t, place): None for t in writes}
        self._events.append(
            Operator(
                str(func),
                segment.phase,
                segment.recompute,
                self._module(segment),
                dtype_of([*taken, *returned]),
                flops_of(func, args, kwargs, output),
                nbytes_of(reads),
                0 if "empty" in func._opname else nbytes_of(writes),
                workspace_of(func, args, output) if place == "cpu" else 0,
                tuple(record.number for record in inputs),
                tuple(record.number for record in outputs),
            )
        )
        if segment.phase == "backward":
            self._calls.extend_backward()

    def _module(self, segment: Segment) -> str | None:
        running = self._calls.running if segment.recompute or segment.phase == "forward" else None
        return self._calls.running_backward if running is None and segment.phase == "backward" else running

    def _assumed(self, func: Any, args: tuple[Any, ...]) -> bool | int | float:
        """Return the value that the program is told where it asks for one."""
        value: bool | int | float = True
        if func._opname in ("_local_scalar_dense", "item"):
            dtype = args[0].dtype
            value = 1.0 if dtype.is_floating_point else True if dtype is torch.bool else 1
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
            if frame.f_code.co_filename.endswith(("grad_scaler.py", "clip_grad.py")):
                value = 0.0  # no gradient is infinite, so that the optimizer steps
            frame = frame.f_back
        self._notes.append(Note(str(func), line_of(sys._getframe(2)), value))
        return value
