"""Runs a training step of a plain model on fake tensors, and returns what it does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.optim.optimizer as torch_optimizer
import torch.utils._foreach_utils as foreach_utils
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode

from ..errors import TraceError
from .cuda_stand_in import CudaStandIn
from .fake_model import FakeModel
from .step_recorder import Recorder
from .step_trace import StepTrace
from .user_lines import Failure, line_of


def trace_step(
    model: nn.Module,
    step: Callable[[nn.Module], object],
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    optimizers: Iterable[torch.optim.Optimizer] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> StepTrace:
    """Run a training step without memory or computation, and return what happened.

    While it runs, the model has fake tensors on `device` as parameters, buffers and other tensor attributes, wherever its own
    are; ``meta`` is fine. Its own are given back whatever happens, as are all attributes of modules that the step changes, and
    the state of torch's random numbers.

    Values don't exist. Where the step reads one (``item()``, ``if tensor:``) it is told 1.0, 1 or True, with a note, or what it
    truly is for constants made in the step (``torch.tensor(3).item()``). To a GradScaler all gradients are finite.

    Args:
        model: a plain module: parameters are strided tensors without wrappers.
        step: what is to be traced, called with `model`: forward, backward, and whatever else belongs to a step. It makes its
            inputs itself (``torch.randn(8, 16, device=...)``), or has them from outside as real or ``meta`` tensors.
        device: the type of device on which the model is to be.
        optimizers: the optimizers that were made before and that the step uses. They hold the model's own parameters, which have
            no gradients here. Optimizers that the step makes from ``model.parameters()`` need not be named.
        dtypes: the dtypes of parameters that have another dtype in this step than their own, by full name.

    Raises:
        TraceError: the step fails: a shape depends on values, a kernel or an attribute needs a real tensor, or the program
            itself raises. The message has the operator and the line, ``__cause__`` the error.

    With ``device="cuda"`` no such device is needed, and ``tensor.device`` says ``cpu``, see
    :mod:`torch_shard.plan.cuda_stand_in`. The main thread alone is traced. Operators of ``create_graph=True`` backwards count
    as recomputation.
    """
    random_state = torch.get_rng_state()
    try:
        with tracing(model, device=device, optimizers=optimizers, dtypes=dtypes) as recorder:
            try:
                step(model)
                return recorder.finish()  # before what the model and its optimizers hold is given back
            except TraceError:
                raise
            except Exception as error:
                raise explained(error, recorder.failure) from error
    finally:
        torch.set_rng_state(random_state)


@contextmanager
def tracing(
    model: nn.Module,
    *,
    device: Literal["cpu", "cuda"],
    optimizers: Iterable[torch.optim.Optimizer],
    dtypes: Mapping[str, torch.dtype] | None = None,
    all_on_device: bool = False,
) -> Iterator[Recorder]:
    """Record what runs inside, as :func:`trace_step` does.

    With `all_on_device` the program believes that it runs on the CPU. What it computes with parameters, of any model, is then on
    the device, and so is what it computes that from. The rest, such as the sampling of batches, has true values, and is not
    recorded.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
    fakes = FakeModel(model, optimizers, mode, device, dtypes or {})
    recorder = Recorder(model, fakes, mode, device, all_on_device)
    with ExitStack() as stack:
        stack.callback(fakes.restore)
        fakes.install()
        for types in (torch_optimizer._foreach_supported_types, foreach_utils._foreach_supported_types):
            # Torch decides by the type whether multi-tensor kernels take a tensor.
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        for replacement in _replacements(recorder):
            stack.enter_context(replacement)
        stack.enter_context(recorder.hooks())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        if device == "cuda":
            stack.enter_context(CudaStandIn(recorder.storages, all_on_device).entered())
        recorder.begin()
        yield recorder


def explained(error: BaseException, failure: Failure | None) -> TraceError:
    """Return the error to raise for one that came out of the step."""
    if failure is not None and failure.error is error:
        if isinstance(error, DynamicOutputShapeException):
            return TraceError(
                f"{failure.operator} at {failure.line} has an output whose shape depends on values, which a trace does not have. "
                "Use a form of fixed shape there (torch.where with three arguments, a product with the mask), or do it "
                "outside of the step."
            )
        return TraceError(
            f"{failure.operator} at {failure.line} can't run on fake tensors: {type(error).__name__}: {error}"
        )
    return TraceError(
        f"the step fails on fake tensors, which have neither values nor memory, at {line_of(error.__traceback__)}: "
        f"{type(error).__name__}: {error}"
    )


def _replacements(recorder: Recorder) -> Iterator[AbstractContextManager[Any]]:
    """Yield contexts in which torch and the libraries that are loaded treat fakes as they treat real tensors."""
    of_optimizer, of_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        return (p for group in optimizer.param_groups for p in group["params"])

    yield patch.object(torch.optim.Optimizer, "zero_grad", _noted(recorder, of_optimizer, parameters_of))
    yield patch.object(nn.Module, "zero_grad", _noted(recorder, of_module, nn.Module.parameters))
    transformers = sys.modules.get("transformers.utils.import_utils")
    if hasattr(transformers, "is_fake_tensor"):
        # By this, transformers (5.24) would take a way that compilers can follow.
        yield patch.object(transformers, "is_fake_tensor", lambda value: False)
    # Torch's own are for its own class: they set a storage that fakes of constants can't have, and take no format.
    yield patch.object(FakeTensor, "__deepcopy__", _copied)
    yield patch.object(FakeTensor, "__format__", _formatted)


def _noted(recorder: Recorder, zero_grad: Any, parameters_of: Callable[[Any], Iterable[torch.Tensor]]) -> Any:
    """Return a ``zero_grad()`` that tells the recorder, also where there is no gradient yet, which there is in later steps."""

    def noting(self: Any, set_to_none: bool = True) -> None:
        if set_to_none:
            recorder.gradients_cleared(parameters_of(self))
        zero_grad(self, set_to_none)

    return noting


def _copied(self: FakeTensor, memo: dict[int, Any]) -> Any:
    if id(self) not in memo:
        copied = self.detach().clone()
        copied = nn.Parameter(copied, False) if getattr(self, "_is_param", False) else copied
        memo[id(self)] = copied.requires_grad_(self.requires_grad)
    return memo[id(self)]


def _formatted(self: FakeTensor, form: str) -> str:
    return format(self.item(), form) if self.dim() == 0 else object.__format__(self, form)
