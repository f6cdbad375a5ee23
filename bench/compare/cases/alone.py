"""What one rank does alone, under ``if rank == 0:``."""

from __future__ import annotations

import copy

import torch

from compare.case import Job, case
from tests.support.models import MLP

_ALONE = "test_a_rank_reads_alone_what_plain_torch_gives"


@case("`if rank == 0:` around a norm", test=_ALONE)
def norm_alone(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for step, x in enumerate(job.batches(3)):
        job.train(model, optimizer, x)
        if job.rank == 0:
            job.see(f"norm after step {step}", job.unwrapped(model).head.weight.norm().item())


@case("`if rank == 0:` around a forward without gradients", test=_ALONE)
def forward_alone(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for step, x in enumerate(job.batches(3)):
        job.train(model, optimizer, x)
        if job.rank == 0:
            with torch.no_grad():
                job.see(f"output after step {step}", model(job.batch(50, shared=True)))


@case("more validation batches on one rank than on the other", test="test_evaluations_of_different_length")
def uneven_validation(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(3):
        job.train(model, optimizer, x)
        model.eval()
        with torch.no_grad():
            for number in range(3 if job.rank == 0 else 1):
                job.see(f"validation {number}", model(job.batch(50 + number, shared=True)))
        model.train()


@case(
    "`if rank == 0:` around an evaluation with averaged weights, which are then taken out again",
    test="test_one_rank_reads_averaged_weights_and_training_goes_on_without_them",
)
def averages_alone(job: Job) -> None:
    plain = MLP()
    average = [torch.full_like(p, 0.1) for p in plain.parameters()]
    model, optimizer = job.prepare(plain)
    for step, x in enumerate(job.batches(3)):
        job.train(model, optimizer, x)
        if job.rank == 0:
            params = list(job.unwrapped(model).parameters())
            before = [p.detach().clone() for p in params]
            for p, value in zip(params, average, strict=True):
                p.data.copy_(value)
            with torch.no_grad():
                job.see(f"output after step {step}", model(job.batch(50, shared=True)))
            for p, value in zip(params, before, strict=True):
                p.data.copy_(value)


@case(
    "`if rank == 0:` around a forward of `copy.deepcopy(model)`",
    test="test_a_copy_that_only_this_rank_has_made_is_read_from_the_original",
)
def copy_alone(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for step, x in enumerate(job.batches(3)):
        job.train(model, optimizer, x)
        if job.rank == 0:
            with torch.no_grad():
                job.see(f"output after step {step}", copy.deepcopy(job.unwrapped(model))(job.batch(50, shared=True)))
