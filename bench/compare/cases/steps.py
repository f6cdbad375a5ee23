"""Steps as any script has them: inputs and outputs, evaluation, accumulation, clipping."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compare.case import Job, case, sgd
from tests.support.models import MLP, MixedTypes, Structured, Uneven, loss_of


@case("a plain step", test="test_a_plain_step_trains_like_the_plain_model")
def plain_step(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "keyword arguments, a dict with lists and tuples as output",
    test="test_keyword_arguments_and_nested_dict_outputs_train_like_plain",
)
def structures(job: Job) -> None:
    model, optimizer = job.prepare(Structured())
    for x in job.batches(3):
        job.backward(loss_of(model(x=x, scale=0.5, extra=None)), model)
        optimizer.step()
        optimizer.zero_grad()


@dataclass
class Output:
    logits: Tensor
    hidden: list[Tensor]


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value


class Returns(nn.Module):
    """A block that returns an object."""

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 5)
        self.custom = custom

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        return Custom(self.b(h)) if self.custom else Output(self.b(h), [h])


class Nest(nn.Module):
    """Passes what its block returns on, and returns an object itself."""

    def __init__(self, custom: bool) -> None:
        super().__init__()
        self.inner, self.last = Returns(custom), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return Custom(self.last(out.value)) if isinstance(out, Custom) else Output(self.last(out.logits), out.hidden)


@case("a dataclass as output, of a block and of the model", test="test_an_object_as_output_trains_like_plain")
def dataclass_output(job: Job) -> None:
    model, optimizer = job.prepare(Nest(custom=False), blocks=(Returns,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("an object of a class of one's own as output", test="test_an_object_as_output_trains_like_plain")
def object_output(job: Job) -> None:
    model, optimizer = job.prepare(Nest(custom=True), blocks=(Returns,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("shapes that the number of ranks does not divide", test="test_uneven_shapes_train_like_plain")
def uneven_shapes(job: Job) -> None:
    model, optimizer = job.prepare(Uneven(), blocks=(nn.Linear,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


def _evaluation(job: Job, context: type[torch.no_grad | torch.inference_mode]) -> None:
    model, optimizer = job.prepare(MLP())
    for step, x in enumerate(job.batches(3)):
        model.eval()
        with context():
            job.see(f"evaluation {step}", model(job.batch(50 + step, shared=True)).clone())
        model.train()
        job.train(model, optimizer, x)


@case(
    "evaluation before the first step and between steps",
    test="test_evaluation_between_training_steps_gives_the_plain_results",
)
def evaluation(job: Job) -> None:
    _evaluation(job, torch.no_grad)


@case(
    "evaluation before the first step and between steps, under `torch.inference_mode`",
    test="test_evaluation_between_training_steps_gives_the_plain_results",
)
def inference_mode(job: Job) -> None:
    _evaluation(job, torch.inference_mode)


@case(
    "a forward without gradients between forward and backward",
    test="test_a_forward_without_gradients_between_forward_and_backward_changes_nothing",
)
def forward_in_between(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        out = model(x)
        with torch.no_grad():
            target = model(x + 1)
        job.backward(loss_of(out) + (out - target).pow(2).mean(), model)
        optimizer.step()
        optimizer.zero_grad()


def _accumulation(job: Job, sync: bool, **options: Any) -> None:
    model, optimizer = job.prepare(MLP(), accumulates=True, **options)
    for step in range(3):
        for micro in range(2):
            with contextlib.nullcontext() if sync or micro == 1 else job.no_sync(model):
                job.backward(loss_of(model(job.batch(10 * step + micro))), model)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "accumulation, gradients reduced at each backward",
    test="test_accumulation_with_gradient_sync_every_time_trains_like_plain",
    note="ZeRO-3 with `managed_gradient_accumulation: false`, which lets the script decide when to step.",
)
def accumulation(job: Job) -> None:
    _accumulation(job, sync=True)


@case(
    "accumulation, gradients reduced at the last backward",
    test="test_accumulation_without_gradient_sync_trains_like_plain",
    note="`no_sync()` of DDP, FSDP1 and this engine, `set_requires_gradient_sync` of FSDP2; ZeRO-3 has none.",
)
def no_sync(job: Job) -> None:
    _accumulation(job, sync=False)


_OFFLOAD = (
    "`CPUOffloadPolicy(pin_memory=False)`, ZeRO-3's `offload_param` and `offload_optimizer`, "
    '`offload="cpu"`; that of FSDP1 needs an accelerator. Here the model computes on the CPU, too, so this says nothing about '
    "offload from a GPU."
)


@case("offload to the CPU", test="offload/test_training.py", note=_OFFLOAD)
def offload(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), offload=True)
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case(
    "offload and accumulation, gradients reduced at each backward",
    test="offload/test_training.py",
    note="As for offload.",
)
def offload_and_accumulation(job: Job) -> None:
    _accumulation(job, sync=True, offload=True)


def _clipping(job: Job, model: nn.Module, limit: float, lr: float = 0.1, **options: Any) -> None:
    model, optimizer = job.prepare(model, lambda m: sgd(m, lr=lr), clip=limit, **options)
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        job.clip(model, limit)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "`torch.nn.utils.clip_grad_norm_`",
    test="test_torch_clip_grad_norm_gives_the_plain_norm_and_gradients",
    note="FSDP1 and DeepSpeed have calls of their own instead, in the next row.",
)
def torchs_clipping(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "clipping by each engine's own call",
    test="grad_clip/test_clip.py",
    dtype=torch.float32,
    note="`model.clip_grad_norm_` of FSDP1, which takes no float64, `gradient_clipping` in DeepSpeed's configuration, "
    "`engine.clip_grad_norm_` of this engine. DDP and FSDP2 have torch's function.",
)
def own_clipping(job: Job) -> None:
    _clipping(job, MLP(), 0.1)


class InHalf(nn.Linear):
    """A layer in bfloat16 between others in float32."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x.bfloat16())).float()


class DtypesApart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks, self.head = nn.Linear(5, 7), nn.Sequential(InHalf(7), InHalf(7)), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.inp(x)))


@case(
    "clipping by each engine's own call, gradients of several dtypes",
    test="test_several_dtypes",
    dtype=torch.float32,
    tolerance=(0.0, 0.02),
    note="Units of bfloat16 and a rest of float32, so that no unit has two dtypes. Parameters must be within 0.02.",
)
def clipping_of_dtypes(job: Job) -> None:
    _clipping(job, DtypesApart(), 1.0, blocks=(InHalf,), lr=1.0)


@case(
    "parameters of several dtypes in one unit",
    test="test_several_dtypes_inside_one_unit_train_like_plain",
    tolerance=(1e-5, 1e-6),
)
def several_dtypes(job: Job) -> None:
    model, optimizer = job.prepare(MixedTypes(), blocks=())
    for x in job.batches(3):
        job.backward(loss_of(model(x.double())), model)
        optimizer.step()
        optimizer.zero_grad()


class CastsItself(nn.Module):
    """Casts its input to its layer's dtype, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.child(x.to(self.child.weight.dtype)))


@case(
    "mixed precision, inputs cast by `x.to(self.child.weight.dtype)`",
    test="test_inside_a_forward_everything_has_the_dtype_of_the_computation",
    dtype=torch.float32,
    tolerance=(0.0, 0.03),
    note="`MixedPrecision(torch.bfloat16)`, `MixedPrecisionPolicy(torch.bfloat16)`, DeepSpeed's `bf16` and "
    "`precision=torch.bfloat16`. Parameters must be within 0.03 of those of float32.",
)
def mixed_precision(job: Job) -> None:
    model = nn.Sequential(*(CastsItself() for _ in range(3)))
    model, optimizer = job.prepare(model, lambda m: sgd(m, lr=1.0), blocks=(CastsItself,), mixed=True)
    for x in job.batches(3):
        job.backward(loss_of(model(x).float()), model)
        optimizer.step()
        optimizer.zero_grad()


@case("gradients zeroed in place, `zero_grad(set_to_none=False)`", test="test_zero_grad")
def zeroed(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: sgd(m, momentum=0.9))
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@case("`model.zero_grad()`, not the optimizer's", test="test_zero_grad")
def zeroed_by_model(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: sgd(m, momentum=0.9))
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        optimizer.step()
        model.zero_grad()
