"""What one rank does alone, under ``if rank == 0:``."""

from __future__ import annotations

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
