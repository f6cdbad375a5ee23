"""Cases for bench/compare.py, one for each letter of its table."""

from __future__ import annotations

import time

from compare.case import Job, case

from tests.support.models import MLP, loss_of


@case("right")
def right(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    for x in job.batches(2):
        job.train(model, optimizer, x)


@case("wrong: one rank's loss counts twice")
def wrong(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    job.backward((1 + job.rank) * loss_of(model(job.batch(0))), model)
    optimizer.step()


@case("wrong: one rank sees something else")
def seen(job: Job) -> None:
    job.prepare(MLP())
    job.see("rank", job.rank)


@case("an error on one rank, while the other waits for it")
def error(job: Job) -> None:
    model, optimizer = job.prepare(MLP())
    if job.rank == 1:
        raise ValueError("no such file")
    job.train(model, optimizer, job.batch(0))


@case("one rank does not come", timeout=1.0)
def hang(job: Job) -> None:
    if job.rank == 1:
        time.sleep(60)
