"""Optimizers, and what is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compare.case import Job, case, sgd
from tests.support.models import MLP, loss_of
from tests.support.optimizers import SAM, Decayed

O = torch.optim


def _train(job: Job, make: Callable[[nn.Module], O.Optimizer], steps: int = 4) -> None:
    model, optimizer = job.prepare(MLP(), make)
    for x in job.batches(steps):
        job.train(model, optimizer, x)


@case("AdamW", test="test_an_optimizer_steps_as_on_the_plain_model")
def adamw(job: Job) -> None:
    _train(job, lambda m: O.AdamW(m.parameters(), lr=0.01))


@case("AdamW, `foreach=True`", test="test_an_optimizer_steps_as_on_the_plain_model")
def adamw_foreach(job: Job) -> None:
    _train(job, lambda m: O.AdamW(m.parameters(), lr=0.01, foreach=True))


@case("AdamW, `fused=True`", test="test_an_optimizer_steps_as_on_the_plain_model")
def adamw_fused(job: Job) -> None:
    _train(job, lambda m: O.AdamW(m.parameters(), lr=0.01, fused=True))


@case("RMSprop", test="test_an_optimizer_steps_as_on_the_plain_model")
def rmsprop(job: Job) -> None:
    _train(job, lambda m: O.RMSprop(m.parameters(), lr=0.01, momentum=0.9))


@case("Adagrad, which creates its state in its constructor", test="test_an_optimizer_steps_as_on_the_plain_model")
def adagrad(job: Job) -> None:
    _train(job, lambda m: O.Adagrad(m.parameters(), lr=0.01))


@case("Adafactor", test="optim/test_matrix_steps.py")
def adafactor(job: Job) -> None:
    _train(job, lambda m: O.Adafactor(m.parameters(), lr=0.01))


class Matrices(nn.Module):
    """All parameters are matrices, for Muon takes no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@case(
    "Muon",
    test="optim/test_matrix_steps.py",
    tolerance=(0.0, 0.01),
    note="`torch.optim.Muon` orthogonalises in bfloat16, so parameters must be within 0.01 after two steps of 0.1. "
    "DeepSpeed has a Muon of its own, which is not tried.",
)
def muon(job: Job) -> None:
    model, optimizer = job.prepare(Matrices(), lambda m: O.Muon(m.parameters(), lr=0.1), blocks=(nn.Linear,))
    for x in job.batches(2):
        job.train(model, optimizer, x)


@case("a learning-rate schedule", test="test_schedulers", note="Of the optimizer that DeepSpeed was given, for ZeRO-3.")
def schedule(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: sgd(m, momentum=0.9))
    rate = O.lr_scheduler.LambdaLR(getattr(optimizer, "own", optimizer), lambda step: 1 / (1 + step))
    for x in job.batches(4):
        job.train(model, optimizer, x)
        rate.step()


@case(
    "`optimizer.state_dict()` loaded into another optimizer",
    test="test_the_optimizers_own_state_dict_loads_into_another",
    note="DeepSpeed has `engine.save_checkpoint` instead.",
)
def state_loaded(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: O.Adam(m.parameters(), lr=0.01))
    for x in job.batches(2):
        job.train(model, optimizer, x)
    other = O.Adam(model.parameters(), lr=0.5)
    other.load_state_dict(optimizer.state_dict())
    for step in range(2, 4):
        job.train(model, other, job.batch(step))


@case("SAM, with two closures in a step", test="test_sam_with_its_two_closures")
def sam(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: SAM(m.parameters(), lr=0.1, momentum=0.9), accumulates=True)
    for x in job.batches(3):

        def closure(x: Tensor = x) -> Tensor:
            model.zero_grad()
            loss = loss_of(model(x))
            job.backward(loss, model)
            return loss

        optimizer.step(closure)


@case(
    "a subclass of Adam that edits gradients, then calls `super().step()`",
    test="test_an_optimizer_subclass_that_calls_super_step",
)
def subclass(job: Job) -> None:
    _train(job, lambda m: Decayed(m.parameters(), lr=0.01))


class Interrupted(O.SGD):
    """A step that fails when it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise InterruptedError
        return super().step(closure)


@case(
    "an exception inside `optimizer.step()`, then training goes on", test="test_an_exception_inside_the_optimizers_step"
)
def failing_step(job: Job) -> None:
    made: list[Interrupted] = []

    def make(model: nn.Module) -> O.Optimizer:
        made.append(Interrupted(model.parameters(), lr=0.1, momentum=0.9))
        return made[0]

    model, optimizer = job.prepare(MLP(), make)
    for x in job.batches(3):
        job.backward(loss_of(model(x)), model)
        made[0].fails = True
        try:
            optimizer.step()
        except InterruptedError:
            made[0].fails = False
            optimizer.step()
        optimizer.zero_grad()


@case("a step hook that calls `state_dict()` of model and optimizer", test="test_a_step_hook_that_calls_state_dict")
def step_hook(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), lambda m: O.AdamW(m.parameters(), lr=0.01))

    def look(*_: Any) -> None:
        optimizer.state_dict()
        model.state_dict()

    optimizer.register_step_post_hook(look)
    for x in job.batches(3):
        job.train(model, optimizer, x)
