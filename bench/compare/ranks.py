"""The processes of one engine: they run case after case, and are made anew after one that failed or hung."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .case import CASES, Job
from .engines import ENGINES, NotApplicable

__all__ = ["Outcome", "Ranks"]

START = 600.0
"""Seconds until the processes are there; DeepSpeed may have to compile first."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case on all ranks.

    Attributes:
        kind: "done", "none" (not applicable), "error" or "hang".
        results: what :meth:`Job.result <compare.case.Job.result>` has returned on each rank, pickled.
        text: what went wrong, or why it is not applicable.
    """

    kind: str
    results: tuple[bytes, ...] = ()
    text: str = ""


class Ranks:
    """The processes of an engine, forked from this one, which has imported the engine and must not have run anything with torch.

    Args:
        engine: a key of ``ENGINES``.
        count: how many.
        dtype: of the models' parameters.
    """

    def __init__(self, engine: str, count: int, dtype: torch.dtype) -> None:
        for module in ENGINES[engine].modules:
            importlib.import_module(module)
        self._arguments = engine, count, dtype
        self._processes: list[Any] = []
        self._links: list[Connection] = []
        self._folder = ""

    def run(self, name: str, timeout: float) -> Outcome:
        """Run a case on all ranks."""
        if not self._processes:
            self._start()
        for link in self._links:
            with contextlib.suppress(BrokenPipeError):  # it died, and that shows below
                link.send(name)
        outcome = self._collect(timeout)
        if outcome.kind in ("error", "hang"):
            self.close()
        return outcome

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process, link in zip(self._processes, self._links, strict=True):
            process.join()
            link.close()
        self._processes, self._links = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._folder = tempfile.mkdtemp(prefix="compare-")
        for rank in range(self._arguments[1]):
            ours, theirs = context.Pipe()
            arguments = (rank, self._folder, theirs, *self._arguments)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()  # else the end of the process would not show
            self._processes.append(process)
            self._links.append(ours)
        outcome = self._collect(START)
        if outcome.kind != "done":
            self.close()
            raise RuntimeError(f"the processes for {self._arguments[0]} did not start: {outcome.text or outcome.kind}")

    def _death(self, rank: int) -> str:
        """Return how a process has ended that should not."""
        process = self._processes[rank]
        process.join(1.0)
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        log = Path(self._folder, f"{rank}.log").read_text(errors="replace")
        return f"rank {rank} died: {how}\n{log[-4000:]}"

    def _stacks(self, ranks: list[int]) -> str:
        """Return where these ranks are now."""
        for rank in ranks:
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{Path(self._folder, f'{rank}.stacks').read_text()}" for rank in ranks)

    def _collect(self, timeout: float) -> Outcome:
        """Wait for all ranks, or for the first that fails: whoever waits for that one would wait for ever."""
        waiting = dict(zip(self._links, range(len(self._links)), strict=True))
        found: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ended = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ended:
                return Outcome("hang", text=f"no end within {timeout:g} s\n{self._stacks(list(waiting.values()))}")
            for link in ended:
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    found[rank] = pickle.loads(link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    return Outcome("error", text=self._death(rank))
                if found[rank][0] == "error":
                    return Outcome("error", text=found[rank][1])
        kind, value = found[0]
        if kind == "none":
            return Outcome("none", text=value)
        return Outcome("done", tuple(found[rank][1] for rank in sorted(found)))


# -- in the processes ------------------------------------------------------------------------------


def _serve(rank: int, folder: str, link: Connection, engine: str, count: int, dtype: torch.dtype) -> None:
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(Path(folder, f"{rank}.stacks"), "w")  # noqa: SIM115 (lives as long as this process)
    faulthandler.register(signal.SIGUSR1, stacks)
    faulthandler.enable()
    warnings.simplefilter("ignore")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    torch.set_num_threads(1)
    try:
        if count > 1:
            dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=count)
        ENGINES[engine].start()
        _warm_up(Job(ENGINES[engine], rank, count))
        gc.collect()
        gc.freeze()  # else each collection would go through all modules of torch
        _send(link, "done")
    except BaseException as error:
        _send(link, "error", _described(error, rank))
        os._exit(1)
    by_name = {case.name: case for case in CASES}
    number = 0
    while True:
        try:
            case = by_name[link.recv()]
        except EOFError:  # the parent is gone
            os._exit(0)
        number += 1
        torch.manual_seed(0)
        torch.set_default_dtype(case.dtype or dtype)
        job = Job(ENGINES[engine], rank, count)
        try:
            case.script(job)
            result = job.result()
            if count > 1:
                _check_group(number, count)
            del job
            gc.collect()  # its models and their process groups
            _send(link, "done", pickle.dumps(result))  # tensors by value, not in shared memory
        except NotApplicable as reason:
            _send(link, "none", str(reason))
        except BaseException as error:
            _send(link, "error", _described(error, rank))


def _warm_up(job: Job) -> None:
    """Load what engines load at first use, which may take longer than a case may."""
    model, optimizer = job.prepare(nn.Linear(5, 3, dtype=torch.float32))
    job.train(model, optimizer, job.batch(0).float())


def _send(link: Connection, kind: str, value: Any = None) -> None:
    link.send_bytes(pickle.dumps((kind, value)))


def _described(error: BaseException, rank: int) -> str:
    """Return one line of what was raised, and then its traceback."""
    line = " ".join(str(error).split("\n\n")[0].split())
    trace = "".join(traceback.format_exception(error))
    return f"rank {rank}: {type(error).__name__}: {line}\n{trace}"


def _check_group(number: int, count: int) -> None:
    """Raise where ranks are out of step in the default process group. Call on all ranks."""
    total = torch.tensor([number])
    dist.all_reduce(total)
    if total.item() != number * count:
        raise RuntimeError("the script left the ranks out of step in the default process group")
