"""Unusual graphs: several forwards or backwards, gradients of gradients, checkpoints, exceptions."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from compare.case import Job, case
from tests.support.models import MAML, MLP, Checkpointed, InnerBackward, loss_of


@case("several forwards, then one backward", test="test_several_forwards_and_one_backward_train_like_plain")
def several_forwards(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.backward(loss_of(model(x)) + loss_of(model(x * 2)) + loss_of(model(x - 1)), model)
        optimizer.step()
        optimizer.zero_grad()


@case("two forwards, then the backward of each", test="test_two_forwards_and_then_a_backward_of_each_train_like_plain")
def two_backwards(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), accumulates=True)
    for x in job.batches(3):
        first, second = loss_of(model(x)), loss_of(model(x * 2))
        job.backward(first, model)
        job.backward(second, model)
        optimizer.step()
        optimizer.zero_grad()


@case("double backward (gradient penalty)", test="test_a_gradient_penalty_trains_like_plain")
def gradient_penalty(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        job.backward(loss_of(out) + (slope.norm(dim=1) - 1).pow(2).mean(), model)
        optimizer.step()
        optimizer.zero_grad()


@case("backward twice with `retain_graph`", test="test_backward_twice_with_retain_graph_trains_like_plain")
def backward_twice(job: Job) -> None:
    model, optimizer = job.prepare(MLP(), accumulates=True)
    for x in job.batches(3):
        loss = loss_of(model(x))
        job.backward(loss, model, retain_graph=True)
        job.backward(2 * loss, model)
        optimizer.step()
        optimizer.zero_grad()


def _checkpointed(job: Job, reentrant: bool) -> None:
    model, optimizer = job.prepare(Checkpointed(reentrant))
    for x in job.batches(3):
        job.train(model, optimizer, x)


@case("activation checkpointing", test="test_checkpointing_trains_like_plain")
def checkpointing(job: Job) -> None:
    _checkpointed(job, reentrant=False)


@case("activation checkpointing, `use_reentrant=True`", test="test_checkpointing_trains_like_plain")
def reentrant_checkpointing(job: Job) -> None:
    _checkpointed(job, reentrant=True)


class Oops(Exception):
    pass


def _raise(*_: Any) -> None:
    raise Oops


def _exception(job: Job, in_backward: bool) -> None:
    model, optimizer = job.prepare(MLP())
    block = job.unwrapped(model).blocks[1]

    def spoil(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(_raise)

    for step, x in enumerate(job.batches(4)):
        if step in (0, 2):
            handle = (
                block.up.register_forward_hook(spoil) if in_backward else block.up.register_forward_pre_hook(_raise)
            )
            with contextlib.suppress(Oops):
                job.backward(loss_of(model(job.batch(50 + step))), model)
            handle.remove()
            optimizer.zero_grad()
        job.train(model, optimizer, x)


_EXCEPTION = "test_an_exception_and_then_training_goes_on_like_plain"


@case("an exception in forward, then training goes on", test=_EXCEPTION)
def exception_in_forward(job: Job) -> None:
    _exception(job, in_backward=False)


@case("an exception in backward, then training goes on", test=_EXCEPTION)
def exception_in_backward(job: Job) -> None:
    _exception(job, in_backward=True)


@case("`loss.backward(inputs=parameters)`", test="test_backward_with_inputs_gives_gradients_to_those_parameters_only")
def backward_inputs(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        inner = job.unwrapped(model)
        loss_of(model(x)).backward(inputs=[inner.blocks[1].up.weight, inner.inp.bias])
        optimizer.step()
        optimizer.zero_grad()


@case(
    "`torch.autograd.grad(loss, parameters)`",
    test="test_gradients_of_autograd_grad_that_are_assigned_are_averaged_as_by_backward",
    note="DDP's documentation says that it does not work.",
)
def autograd_grad(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        parameters = list(model.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(loss_of(model(x)), parameters), strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()


@case(
    "`torch.func.functional_call` with other values for the head",
    test="test_functional_call_with_some_values_trains_the_rest_like_plain",
)
def with_other_values(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        name = next(name for name, _ in model.named_parameters() if name.endswith("head.weight"))
        other = torch.full((3, 7), 0.3, dtype=x.dtype)
        job.backward(loss_of(functional_call(model, {name: other}, (x,))), model)
        optimizer.step()
        optimizer.zero_grad()


@case(
    "fast weights by a gradient inside forward (MAML)",
    test="test_maml_with_a_gradient_inside_forward_trains_like_plain",
    note="Both ranks see one batch: the inner step takes the gradient of the mean over it.",
)
def maml(job: Job) -> None:
    model, optimizer = job.prepare(MAML(), blocks=())
    for x in job.batches(3, shared=True):
        job.train(model, optimizer, x)


@case(
    "a whole backward inside forward",
    test="test_a_whole_backward_inside_a_running_forward_trains_like_plain",
    note="Both ranks see one batch: what the inner backward gives is of the sum over it.",
)
def backward_inside(job: Job) -> None:
    model, optimizer = job.prepare(InnerBackward(), blocks=(nn.Linear,))
    for x in job.batches(3, shared=True):
        job.train(model, optimizer, x)


@case(
    "compiled blocks",
    test="test_it_trains_like_plain_without_recompiling_after_the_second_step",
    note='`block.compile(backend="aot_eager")` after sharding.',
    timeout=120.0,
)
def compiled(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for block in job.unwrapped(model).blocks:
        block.compile(backend="aot_eager")
    for x in job.batches(3):
        job.train(model, optimizer, x)
