"""Traces the step of a script that runs, from where it is to the end of the step, in a branch of the process.

The branch goes on with the script on fake tensors, and ends at the first forward after the optimizers have stepped. This process
stays where it is, its model is untouched, and it may trace the same step again in another way.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, NoReturn
from unittest.mock import patch

import torch
import torch.utils.data.dataloader as loading
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from ..config.shard_config import ShardConfig
from ..errors import ShardError, TraceError
from ..utils.autograd_private import graph_task
from ..utils.branch import Branch, branch
from .plan import Plan
from .step_recorder import Recorder
from .step_trace import StepTrace
from .trace_for import computing_as
from .trace_step import explained, tracing


class OnlyEvaluated(TraceError):
    """The script has closed the engine, and had not trained with it."""


def trace_script(
    model: nn.Module,
    plan: Plan,
    config: ShardConfig,
    *,
    device: Literal["cpu", "cuda"],
    checkpointed: Iterable[nn.Module],
    offloaded: bool,
) -> StepTrace | ScriptStep:
    """Trace the rest of the script's first step. Returns twice: the trace here, and in the branch a :class:`ScriptStep`.

    In the branch, return to the script; what it raises, and its end, must be told to that object.

    Args:
        model: the model that trains, with its own tensors.
        plan, config: its plan, and the settings.
        device: the type of device that the step is for. The script believes that it runs on the CPU.
        checkpointed: modules that recompute.
        offloaded: their inputs wait for backward in host memory.

    Raises:
        OnlyEvaluated: the engine is closed before the model trains.
        TraceError: the rest of the step can't be traced.
    """
    there = branch()
    if not isinstance(there, Branch):
        return there
    null = open(os.devnull, "w")  # noqa: SIM115  for what the script prints, about a step that does not happen
    for stream in (1, 2):
        os.dup2(null.fileno(), stream)
    sys.stdout = sys.stderr = null
    return ScriptStep(there, model, device, computing_as(model, plan, config, checkpointed, offloaded))


class ScriptStep:
    """The step that is traced in this process, which is a branch, from where the step is made to the end of the process."""

    def __init__(
        self,
        told: Branch,
        model: nn.Module,
        device: Literal["cpu", "cuda"],
        computing: AbstractContextManager[dict[str, torch.dtype]],
    ):
        self._told = told
        self._model = model
        self._parts = {id(module) for module in model.modules()}
        self._waiting: set[int] | None = None  # the optimizers that are yet to step, from the first step on
        self._begun = False  # the first forward that trains
        self._open = ExitStack()
        # Before the recorder's own, which must not see the forward that ends the step.
        register_module_forward_pre_hook(self._forward_begins)
        self._open.enter_context(_loading_outside())
        try:
            dtypes = self._open.enter_context(computing)
            self._recorder: Recorder = self._open.enter_context(
                tracing(model, device=device, optimizers=_optimizers_of(model), dtypes=dtypes, all_on_device=True)
            )
        except TraceError as error:
            told.end(error)
        register_optimizer_step_post_hook(self._has_stepped)

    def failed(self, error: BaseException) -> NoReturn:
        """End the branch, since the script has raised `error`; with the trace if the step was over."""
        if self._is_over:
            self._end()
        failure = self._recorder.failure
        while failure is not None and error is not failure.error and error.__context__ is not None:
            error = error.__context__  # a framework may have raised another one in its place
        self._told.end(error if isinstance(error, ShardError) else explained(error, failure))

    def script_ended(self) -> NoReturn:
        """End the branch, since the script is at its end."""
        if self._is_over:
            self._end()
        self._told.end(TraceError("the script ended before all optimizers of the model have stepped."))

    def engine_closes(self) -> None:
        """End the branch if the model has not trained yet, and nothing has failed."""
        if not self._begun and sys.exc_info()[0] is None and self._recorder.failure is None:
            self._told.end(OnlyEvaluated("the engine of the model was closed before it trained."))

    @property
    def _is_over(self) -> bool:
        """True as soon as all optimizers of the model have stepped."""
        return self._waiting is not None and not self._waiting

    def _end(self) -> NoReturn:
        self._told.end(self._recorder.finish())

    def _has_stepped(self, optimizer: Optimizer, *_: object) -> None:
        if self._waiting is None:
            held = _optimizers_of(self._model)
            if not any(each is optimizer for each in held):
                return
            self._waiting = {id(each) for each in held}
        self._waiting.discard(id(optimizer))

    def _forward_begins(self, module: nn.Module, args: object) -> None:
        if id(module) not in self._parts or self._recorder.in_step or graph_task() != -1:
            return
        if self._is_over:
            self._end()
        if not self._begun and torch.is_grad_enabled():
            self._begun = True
            self._recorder.restart()  # without an evaluation that came before


def _optimizers_of(model: nn.Module) -> list[Optimizer]:
    """Return the optimizers, of all that there are, that hold parameters of `model`."""
    own = {id(p) for p in model.parameters()}
    found: list[Optimizer] = []
    for each in gc.get_objects():
        # Not isinstance(), which asks proxies for the class they stand for. Wrappers have no groups of their own.
        groups = vars(each).get("param_groups", ()) if issubclass(type(each), Optimizer) else ()
        if any(id(p) in own for group in groups for p in group["params"]):
            found.append(each)
    return found


@contextmanager
def real_tensors() -> Iterator[None]:
    """Let tensors made inside be real ones, while a script is traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _loading_outside() -> Iterator[None]:
    """Let data be loaded as always: in real tensors, whose values a dataset may need, and by this process itself."""
    iterator: Any = loading._BaseDataLoaderIter
    begin, following = loading.DataLoader.__iter__, iterator.__next__

    def begin_outside(loader: loading.DataLoader[Any]) -> Any:
        # A worker would be a copy of this process, where fakes are in the place of tensors.
        with real_tensors(), patch.object(loader, "num_workers", 0):
            return begin(loader)

    def next_outside(batches: Any) -> Any:
        with real_tensors():
            return following(batches)

    with (
        patch.object(loading.DataLoader, "__iter__", begin_outside),
        patch.object(iterator, "__next__", next_outside),
    ):
        yield
