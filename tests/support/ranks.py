"""Runs tests on several ranks: processes with a process group that are kept from test to test.

**A test that runs on every rank.** Decorate a module-level function; its whole body, asserts
included, runs in each rank process, where ``torch.distributed`` is initialised::

    from tests.support.ranks import ranks

    @ranks(2)
    def test_all_reduce_adds(rank, world_size):
        t = torch.tensor([rank + 1.0])
        dist.all_reduce(t)
        assert t.item() == 3.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @ranks(1, 2, exhaustive=(4,), timeout=20)      # one test for each number of ranks
    def test_something(rank, device, dtype, tmp_path): ...

``rank`` and ``world_size`` are filled in where the body names them. All other arguments are
pytest's: parameters and fixtures that can be pickled (``tmp_path`` is then one folder shared by
the ranks). Put ``parametrize`` and marks above or below ``ranks`` as you like. A body that takes
``device`` runs once per device (see conftest.py) and gets a ``torch.device``. Numbers of ranks that
are given as ``exhaustive`` only run in ``make test-all``.
Test classes and functions defined inside functions do not work: ranks import the body by name.

**A function on every rank, from an ordinary test.** ``run`` returns what each rank returned::

    def body(rank, world_size, scale): ...         # module level; arguments and result: picklable

    def test_it():
        assert run(2, body, 10, timeout=30) == [0, 10]

**Options** of both: ``timeout`` in seconds for the whole job; ``backend="nccl"`` (skips where there
is no GPU; ranks share one where there are too few, and then send through sockets); ``fresh=True``
runs in processes of its own, thrown away afterwards: for bodies that destroy the process group or
change process-wide state; ``group_timeout`` (seconds, the process group's own timeout, implies
fresh); ``may_die=(1,)``: these ranks may end the process, their result is None (implies fresh);
``environment={...}``: variables that are read when the process group is made (implies fresh).

**What a body finds.** One CPU thread; seeds at 0; the default process group over Gloo with
``world_size`` ranks, and the environment that torchrun gives (``RANK``, ``LOCAL_RANK``,
``WORLD_SIZE``, ...). Further groups that it makes are destroyed when it ends. When a body returns,
the pool checks that the default group still works, and fails the test if it does not.

**When it goes wrong.** A failing rank's own traceback and output become the message of
:class:`RankFailure` (``.rank``, ``.kind`` = name of the exception class). Ranks that hang are shown
with the stack of each of their threads. ``pytest.skip`` in a body skips the test. After a failure,
a timeout or a dead rank, the processes are replaced before the next test, and now and then after
bodies that leave much behind.

This file is what runs in the test process; what runs in the ranks is in rank_process.py.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Container, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.rank_process import START_TIMEOUT, Job, Outcome, call_body, serve

GRACE = 3.0  # seconds that the other ranks get to end by themselves once one has failed
OUTPUT_SHOWN = 4000  # characters of a failing rank's output
PRELOAD = ("torch", "torch.distributed", "torch._dynamo", "pytest")
"""Modules that the fork server imports once, for all rank processes. (The first step of any optimizer imports dynamo.)"""
PRELOAD_IF_USED = (
    "torch_shard",
    "lightning.pytorch",
    "pytorch_lightning",
    "accelerate",
    "transformers",
    "transformers.trainer",
)
"""The same, for those that this process has imported too (test modules were collected by then)."""


class RankFailure(AssertionError):
    """A rank failed, hung or died. The message holds its traceback and output."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


class _Pool:
    """The processes of one process group."""

    def __init__(self, world_size: int, backend: str, group_timeout: float, variables: dict[str, str]) -> None:
        self.world_size = world_size
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        # Served by this process, so that it survives any rank.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *(m for m in PRELOAD_IF_USED if m in sys.modules)])
        self.links: list[Connection] = []
        self.processes: list[multiprocessing.process.BaseProcess] = []
        with _environment():
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                args = (rank, world_size, backend, self.store.port, group_timeout, self.folder, variables, theirs)
                process = context.Process(target=serve, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()  # else the end of the process would not show
                self.links.append(ours)
                self.processes.append(process)
        outcomes = self._collect(START_TIMEOUT, may_die=())
        if any(outcome.failed for outcome in outcomes.values()):
            message = self._describe(outcomes)
            self.close(kill=True)
            raise RuntimeError(f"rank processes did not start\n{message}")

    def run(self, job: Job, timeout: float, may_die: Container[int]) -> dict[int, Outcome]:
        data = pickle.dumps(job)
        for file in Path(self.folder).glob("*.log"):
            os.truncate(file, 0)
        for link in self.links:
            # A rank that died since the last job shows when its outcome is collected.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.send_bytes(data)
        return self._collect(timeout, may_die)

    def _collect(self, timeout: float, may_die: Container[int]) -> dict[int, Outcome]:
        """Return every rank's outcome, in the order in which they ended."""
        outcomes: dict[int, Outcome] = {}
        waiting = dict(zip(self.links, range(self.world_size), strict=True))
        deadline = time.monotonic() + timeout
        reason = f"did not end within {timeout:g} s"
        while waiting:
            ended = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ended:
                break
            for link in ended:
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    outcomes[rank] = link.recv()
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = self._died(rank)
                    if rank in may_die:
                        continue
                if outcomes[rank].failed and deadline > time.monotonic() + GRACE:
                    deadline = time.monotonic() + GRACE
                    reason = f"was stopped {GRACE:g} s after rank {rank} had failed"
        hung = sorted(waiting.values())
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        for rank in hung:
            outcomes[rank] = Outcome("hung", f"{reason}, in\n{self._stacks(rank)}")
        return outcomes

    def _stacks(self, rank: int) -> str:
        """Return the dump that the rank was asked for, once it is whole: on a busy machine that takes a while."""
        deadline = time.monotonic() + 10
        text, before = "", None
        while not (text and text == before) and time.monotonic() < deadline:
            before = text
            time.sleep(0.2)
            text = self._read(rank, "stacks")
        return text

    def _died(self, rank: int) -> Outcome:
        process = self.processes[rank]
        process.join(5)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return Outcome("died", f"ended its process with exit code {code}{name}\n")

    def _read(self, rank: int, what: str) -> str:
        return Path(self.folder, f"{rank}.{what}").read_text(errors="replace")

    def _describe(self, outcomes: dict[int, Outcome]) -> str:
        """Return the report on the failed ranks: the first to fail first."""
        parts: list[str] = []
        seen: dict[str, int] = {}
        for rank, outcome in outcomes.items():
            if not outcome.failed:
                continue
            output = self._read(rank, "log").replace("\0", "")[-OUTPUT_SHOWN:]
            title = f"rank {rank} of {self.world_size}"
            if outcome.text in seen:
                parts.append(f"{title}: the same as rank {seen[outcome.text]}")
            elif outcome.kind in ("hung", "died"):
                parts.append(f"{title} {outcome.text}")
            else:
                parts.append(f"{title} failed:\n{outcome.text}")
            if output and outcome.text not in seen:
                parts.append(f"-- output of rank {rank} --\n{output}")
            seen.setdefault(outcome.text, rank)
        return "\n".join(parts)

    def close(self, kill: bool = False) -> None:
        for process, link in zip(self.processes, self.links, strict=True):
            if kill:
                process.kill()
            else:
                with contextlib.suppress(OSError):
                    link.send_bytes(b"")
        deadline = time.monotonic() + 10
        for process, link in zip(self.processes, self.links, strict=True):
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()
            link.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set what the fork server, and with it all ranks, inherit."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback:  # Gloo looks up the host's name otherwise, which some machines cannot resolve
        wanted["GLOO_SOCKET_IFNAME"] = loopback
    before = {key: os.environ.get(key) for key in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


within: Callable[[], contextlib.AbstractContextManager[None]] | None = None
"""What the functions of jobs run in, on each rank; picklable. For fixtures to set, and to clear again."""

_pools: dict[tuple[int, str], _Pool] = {}


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    fresh: bool = False,
    group_timeout: float | None = None,
    may_die: Container[int] = (),
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on every rank; return the results by rank.

    The function is a module-level one; see the module's docstring for the options.

    Raises:
        RankFailure: a rank raised, hung or died.
    """
    __tracebackhide__ = True
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        pytest.skip("needs NCCL and a GPU")
    fresh = fresh or group_timeout is not None or may_die != () or environment is not None
    key = (world_size, backend)
    pool = None if fresh else _pools.get(key)
    if pool is None:
        pool = _Pool(world_size, backend, group_timeout or 120.0, environment or {})
        if not fresh:
            _pools[key] = pool
    outcomes: dict[int, Outcome] = {}
    try:
        outcomes = pool.run(Job(function, args, check_group=not fresh, within=within), timeout, may_die)
        failures = {
            rank: outcome
            for rank, outcome in outcomes.items()
            if outcome.failed and not (outcome.kind == "died" and rank in may_die)
        }
        message = pool._describe(failures)
    finally:
        # An interrupted job (no outcomes) leaves ranks in the middle of something, too.
        all_good = bool(outcomes) and all(outcome.kind == "done" for outcome in outcomes.values())
        worn = any(outcome.worn for outcome in outcomes.values())
        if not fresh and (worn or not all_good):
            del _pools[key]
        if fresh or worn or not all_good:
            pool.close(kill=not all_good)
    if failures:
        rank, outcome = next(iter(failures.items()))
        raise RankFailure(message, rank, outcome.kind)
    for outcome in outcomes.values():
        if outcome.kind == "skipped":
            pytest.skip(outcome.text)
    return [
        pickle.loads(outcomes[rank].result) if outcomes[rank].kind == "done" else None for rank in range(world_size)
    ]


def ranks(
    *world_sizes: int, exhaustive: Sequence[int] = (), **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test's body run on every rank, once for each of `world_sizes`.

    On the numbers of ranks in `exhaustive` it only runs where the exhaustive tests do. `options` are those of
    :func:`run`; see the module's docstring.
    """
    sizes = (*world_sizes, *exhaustive)
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise TypeError("ranks takes numbers of ranks, as in @ranks(2)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        wanted = tuple(signature.parameters)

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            world_size = kwargs.pop("world_size")
            run(world_size, call_body, body.__module__, body.__name__, wanted, kwargs, **options)

        # What pytest sees: rank is ours; world_size is a parameter whether the body takes it or not.
        seen = [p for name, p in signature.parameters.items() if name not in ("rank", "world_size")]
        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*seen, size])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        values = [
            pytest.param(n, id=f"{n}rank{'s' * (n > 1)}", marks=[pytest.mark.exhaustive] * (n not in world_sizes))
            for n in sizes
        ]
        return pytest.mark.parametrize("world_size", values)(test)

    return decorate


def close_all() -> None:
    """Stop all rank processes."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)
