"""Runs tests on several ranks: processes with a process group that are kept from test to test.

**A test that runs on every rank.** Decorate a module-level function; its whole body, asserts
included, runs in each rank process, where ``torch.distributed`` is initialised::

    from tests.ranks import ranks

    @ranks(2)
    def test_all_reduce_adds(rank, world_size):
        t = torch.tensor([rank + 1.0])
        dist.all_reduce(t)
        assert t.item() == 3.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @ranks(1, 2, 4, timeout=20)                    # one test for each number of ranks
    def test_something(rank, device, dtype, tmp_path): ...

``rank`` and ``world_size`` are filled in where the body names them. All other arguments are
pytest's: parameters and fixtures that can be pickled (``tmp_path`` is then one folder shared by
the ranks). Put ``parametrize`` and marks above or below ``ranks`` as you like. A body that takes
``device`` runs once per device (see conftest.py) and gets a ``torch.device``.
Test classes and functions defined inside functions do not work: ranks import the body by name.

**A function on every rank, from an ordinary test.** ``run`` returns what each rank returned::

    def body(rank, world_size, scale): ...         # module level; arguments and result: picklable

    def test_it():
        assert run(2, body, 10, timeout=30) == [0, 10]

**Options** of both: ``timeout`` in seconds for the whole job; ``backend="nccl"`` (skips where there
are not enough GPUs); ``fresh=True`` runs in processes of its own, thrown away afterwards: for
bodies that destroy the process group or change process-wide state; ``group_timeout`` (seconds, the
process group's own timeout, implies fresh); ``may_die=(1,)``: these ranks may end the process, their
result is None (implies fresh).

**What a body finds.** One CPU thread; seeds at 0; the default process group over Gloo with
``world_size`` ranks, and the environment that torchrun gives (``RANK``, ``LOCAL_RANK``,
``WORLD_SIZE``, ...). Further groups that it makes are destroyed when it ends. When a body returns,
the pool checks that the default group still works, and fails the test if it does not.

**When it goes wrong.** A failing rank's own traceback and output become the message of
:class:`RankFailure` (``.rank``, ``.kind`` = name of the exception class). Ranks that hang are shown
with the stack of each of their threads. ``pytest.skip`` in a body skips the test. After a failure,
a timeout or a dead rank, the processes are replaced before the next test.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
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
import traceback
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # seconds until processes and process group exist, on a busy machine
GRACE = 3.0  # seconds that the other ranks get to end by themselves once one has failed
OUTPUT_SHOWN = 4000  # characters of a failing rank's output
PRELOAD = ("torch", "torch.distributed", "pytest")
"""Modules that the fork server imports once, for all rank processes."""
PRELOAD_IF_USED = ("torch_shard", "lightning.pytorch", "pytorch_lightning", "transformers")
"""The same, for those that this process has imported too (test modules were collected by then)."""


class RankFailure(AssertionError):
    """A rank failed, hung or died. The message holds its traceback and output."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


@dataclass(frozen=True)
class _Outcome:
    """What a rank reports about a job: a pickled result, or why there is none."""

    kind: str  # "done", "skipped", "died", "hung", or the name of the exception's class
    text: str = ""
    result: bytes = b""

    @property
    def failed(self) -> bool:
        return self.kind not in ("done", "skipped")


@dataclass(frozen=True)
class _Job:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    check_group: bool


# ------------------------------------------------------------------ in the rank processes


def _serve(rank: int, world_size: int, backend: str, port: int, timeout: float, folder: str, link: Connection) -> None:
    """Main function of a rank process: joins the process group, then runs jobs until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides when to stop
    log = open(Path(folder, f"{rank}.log"), "wb", buffering=0)  # noqa: SIM115 - lives as long as this process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    stacks = open(Path(folder, f"{rank}.stacks"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_USE_AGENT_STORE="True",  # port is served by the test process
    )
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START_TIMEOUT))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo",
            store=dist.PrefixStore("pool", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        _rewrite_asserts()
        # What exists now lives as long as the process: the collection after each job skips it.
        gc.collect()
        gc.freeze()
        link.send(_Outcome("done"))
    except BaseException as error:
        link.send(_report(error))
        return
    _serve_jobs(rank, world_size, link)
    # Interpreter shutdown is skipped: nothing is left to save, and an engine that a failed job left
    # behind could wait in it for partners that are gone.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)


def _serve_jobs(rank: int, world_size: int, link: Connection) -> None:
    number = 0
    while True:
        try:
            data = link.recv_bytes()
        except EOFError:  # the test process is gone
            return
        if not data:
            return
        number += 1
        # A body that opens a default group of its own must not meet the keys of an earlier one.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        outcome = _run_job(data, rank, world_size, number)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            link.send(outcome)
        except (BrokenPipeError, ConnectionResetError):
            return


def _run_job(data: bytes, rank: int, world_size: int, number: int) -> _Outcome:
    try:
        job: _Job = pickle.loads(data)
        torch.manual_seed(0)
        result = job.function(rank, world_size, *job.args)
        outcome = _Outcome("done", result=pickle.dumps(result))
        del result
        if job.check_group:
            _check_group(number, world_size)
    except pytest.skip.Exception as skip:
        return _Outcome("skipped", str(skip))
    except BaseException as error:
        return _report(error)
    try:
        _clean_up()
    except BaseException as error:
        return _report(error)
    return outcome


def _check_group(number: int, world_size: int) -> None:
    """Raise where the default group does not add as it should. Collective."""
    total = torch.tensor([number])
    try:
        dist.all_reduce(total)
    except Exception as error:
        raise RuntimeError("the test left the default process group unusable") from error
    if total.item() != number * world_size:
        raise RuntimeError(
            "the test left the ranks out of step in the default process group: "
            f"a sum over ranks gave {total.item()}, not {number * world_size}"
        )


def _clean_up() -> None:
    """Undo what a body may leave behind."""
    sys.last_value = sys.last_traceback = None  # type: ignore[assignment]
    gc.collect()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter alone imports torch's compiler
        torch.use_deterministic_algorithms(False)
    default = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _report(error: BaseException) -> _Outcome:
    # The frames of this file are the same for every test.
    tb: TracebackType | None = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__ and tb.tb_next is not None:
        tb = tb.tb_next
    text = "".join(traceback.TracebackException(type(error), error, tb).format())
    return _Outcome(type(error).__name__, text)


def _rewrite_asserts() -> None:
    """Let asserts in test modules show their values, as in the test process."""
    # Not public in pytest. Without it asserts only show their source, hence the silence.
    with contextlib.suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite("tests")


def _call_body(
    rank: int, world_size: int, module: str, name: str, wanted: tuple[str, ...], kwargs: dict[str, Any]
) -> None:
    """Run the body of a test that is decorated with :func:`ranks`."""
    body = getattr(importlib.import_module(module), name).rank_body
    ours = {"rank": rank, "world_size": world_size}
    kwargs.update({name: value for name, value in ours.items() if name in wanted})
    if "device" in kwargs:
        kwargs["device"] = _rank_device(kwargs["device"], rank)
    body(**kwargs)


def _rank_device(device: str, rank: int) -> torch.device:
    if device != "cuda":
        return torch.device(device)
    index = rank % torch.cuda.device_count()  # ranks share a GPU where there are too few
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


# ------------------------------------------------------------------ in the test process


class _Pool:
    """The processes of one process group."""

    def __init__(self, world_size: int, backend: str, group_timeout: float) -> None:
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
                args = (rank, world_size, backend, self.store.port, group_timeout, self.folder, theirs)
                process = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
                process.start()
                theirs.close()  # else the end of the process would not show
                self.links.append(ours)
                self.processes.append(process)
        outcomes = self._collect(START_TIMEOUT, may_die=())
        if any(outcome.failed for outcome in outcomes.values()):
            message = self._describe(outcomes)
            self.close(kill=True)
            raise RuntimeError(f"rank processes did not start\n{message}")

    def run(self, job: _Job, timeout: float, may_die: Container[int]) -> dict[int, _Outcome]:
        data = pickle.dumps(job)
        for file in Path(self.folder).glob("*.log"):
            os.truncate(file, 0)
        for link in self.links:
            # A rank that died since the last job shows when its outcome is collected.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                link.send_bytes(data)
        return self._collect(timeout, may_die)

    def _collect(self, timeout: float, may_die: Container[int]) -> dict[int, _Outcome]:
        """Return every rank's outcome, in the order in which they ended."""
        outcomes: dict[int, _Outcome] = {}
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
            outcomes[rank] = _Outcome("hung", f"{reason}, in\n{self._stacks(rank)}")
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

    def _died(self, rank: int) -> _Outcome:
        process = self.processes[rank]
        process.join(5)
        code = process.exitcode
        name = f" ({signal.Signals(-code).name})" if code is not None and code < 0 else ""
        return _Outcome("died", f"ended its process with exit code {code}{name}\n")

    def _read(self, rank: int, what: str) -> str:
        return Path(self.folder, f"{rank}.{what}").read_text(errors="replace")

    def _describe(self, outcomes: dict[int, _Outcome]) -> str:
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
) -> list[Any]:
    """Run ``function(rank, world_size, *args)`` on every rank; return the results by rank.

    The function is a module-level one; see the module's docstring for the options.

    Raises:
        RankFailure: a rank raised, hung or died.
    """
    __tracebackhide__ = True
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.device_count() >= world_size):
        pytest.skip(f"needs NCCL and {world_size} GPU(s)")
    fresh = fresh or group_timeout is not None or may_die != ()
    key = (world_size, backend)
    pool = None if fresh else _pools.get(key)
    if pool is None:
        pool = _Pool(world_size, backend, group_timeout or 120.0)
        if not fresh:
            _pools[key] = pool
    outcomes: dict[int, _Outcome] = {}
    try:
        outcomes = pool.run(_Job(function, args, check_group=not fresh), timeout, may_die)
        failures = {
            rank: outcome
            for rank, outcome in outcomes.items()
            if outcome.failed and not (outcome.kind == "died" and rank in may_die)
        }
        message = pool._describe(failures)
    finally:
        # An interrupted job (no outcomes) leaves ranks in the middle of something, too.
        all_good = bool(outcomes) and all(outcome.kind == "done" for outcome in outcomes.values())
        if not fresh and not all_good:
            del _pools[key]
        if fresh or not all_good:
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


def ranks(*world_sizes: int, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test's body run on every rank, once for each of `world_sizes`.

    `options` are those of :func:`run`; see the module's docstring.
    """
    if not world_sizes or not all(isinstance(size, int) and size > 0 for size in world_sizes):
        raise TypeError("ranks takes numbers of ranks, as in @ranks(2)")

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(body)
        wanted = tuple(signature.parameters)

        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            world_size = kwargs.pop("world_size")
            run(world_size, _call_body, body.__module__, body.__name__, wanted, kwargs, **options)

        # What pytest sees: rank is ours; world_size is a parameter whether the body takes it or not.
        seen = [p for name, p in signature.parameters.items() if name not in ("rank", "world_size")]
        size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = signature.replace(parameters=[*seen, size])  # type: ignore[attr-defined]
        test.rank_body = body  # type: ignore[attr-defined]
        ids = [f"{n}rank{'s' * (n > 1)}" for n in world_sizes]
        return pytest.mark.parametrize("world_size", world_sizes, ids=ids)(test)

    return decorate


def close_all() -> None:
    """Stop all rank processes."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close_all)
