"""What runs in the rank processes of tests/support/ranks.py: each joins a process group, then runs the jobs that it is sent.

The test process starts :func:`serve` in each rank and sends it pickled :class:`Job` objects; the answer to each is an
:class:`Outcome`. What a body may count on is in the docstring of tests/support/ranks.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import pytest
import torch
import torch.distributed as dist

START_TIMEOUT = 120.0  # seconds until processes and process group exist, on a busy machine
_HOME = os.getcwd()
_MOST_THREADS = 60  # an engine over several copies has about half as many


@dataclass(frozen=True)
class Outcome:
    """What a rank reports about a job: a pickled result, or why there is none."""

    kind: str  # "done", "skipped", "died", "hung", or the name of the exception's class
    text: str = ""
    result: bytes = b""
    worn: bool = False  # the process should be replaced

    @property
    def failed(self) -> bool:
        return self.kind not in ("done", "skipped")


@dataclass(frozen=True)
class Job:
    """A function to run as ``function(rank, world_size, *args)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    check_group: bool
    within: Callable[[], contextlib.AbstractContextManager[None]] | None = None


def serve(
    rank: int,
    world_size: int,
    backend: str,
    port: int,
    timeout: float,
    folder: str,
    variables: dict[str, str],
    link: Connection,
) -> None:
    """Main function of a rank process: joins the process group, then runs jobs until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process decides when to stop
    log = open(Path(folder, f"{rank}.log"), "wb", buffering=0)  # noqa: SIM115 - lives as long as this process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    stacks = open(Path(folder, f"{rank}.stacks"), "w")  # noqa: SIM115
    _show_stacks_when_asked(stacks)
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
        **variables,
    )
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < world_size:
            # NCCL refuses two ranks of one host on one GPU, so that each calls itself a host of its own.
            os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
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
        _collect_garbage()
        link.send(Outcome("done"))
    except BaseException as error:
        link.send(_report(error))
        return
    _serve_jobs(rank, world_size, link, stacks)
    # Interpreter shutdown is skipped: nothing is left to save, and an engine that a failed job left
    # behind could wait in it for partners that are gone.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
    os._exit(0)


def _show_stacks_when_asked(file: TextIO) -> None:
    """Dump the stacks of all threads at SIGUSR1.

    Needed before each job: at the end of a run Lightning sets every signal to the handler that Python knew before, and
    Python knows nothing of this one.
    """
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _serve_jobs(rank: int, world_size: int, link: Connection, stacks: TextIO) -> None:
    number = 0
    while True:
        try:
            data = link.recv_bytes()
        except EOFError:  # the test process is gone
            return
        if not data:
            return
        number += 1
        _show_stacks_when_asked(stacks)
        # A body that opens a default group of its own must not meet the keys of an earlier one.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        outcome = _run_job(data, rank, world_size, number)
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            link.send(outcome)
        except (BrokenPipeError, ConnectionResetError):
            return


def _run_job(data: bytes, rank: int, world_size: int, number: int) -> Outcome:
    try:
        job: Job = pickle.loads(data)
        torch.manual_seed(0)
        with contextlib.nullcontext() if job.within is None else job.within():
            result = job.function(rank, world_size, *job.args)
        outcome = Outcome("done", result=pickle.dumps(result), worn=_is_worn())
        del result
        if job.check_group:
            _check_group(number, world_size)
    except pytest.skip.Exception as skip:
        return Outcome("skipped", str(skip))
    except BaseException as error:
        return _report(error)
    try:
        _clean_up()
    except BaseException as error:
        return _report(error)
    return outcome


def _is_worn() -> bool:
    """Whether this process has become slow, and makes others slow.

    Groups in which a body left a collective without its partner live as long as the process, and each has a thread of Gloo's that
    wakes up a hundred times a second.
    """
    try:
        return len(os.listdir("/proc/self/task")) > _MOST_THREADS
    except OSError:  # not on Linux
        return False


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


_modules_seen = 0


def _collect_garbage() -> None:
    """Free what only cycles keep alive. Modules live as long as the process: later collections skip what they made."""
    global _modules_seen
    gc.collect()
    # Going through all the modules of torch takes longer than most tests.
    if len(sys.modules) > _modules_seen:
        gc.freeze()
        _modules_seen = len(sys.modules)


def _clean_up() -> None:
    """Undo what a body may leave behind."""
    os.chdir(_HOME)
    sys.last_value = sys.last_traceback = None  # type: ignore[assignment]
    _collect_garbage()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # the setter alone imports torch's compiler
        torch.use_deterministic_algorithms(False)
    default = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not default:
            dist.destroy_process_group(group)
    # The engines' groups go with these last references. Gloo waits a while when it closes connections: the next test
    # need not.
    engine_groups = sys.modules.get("torch_shard.comm.process_groups")
    if engine_groups is not None and not torch.cuda.is_initialized():
        closing = list(engine_groups._groups.values())
        engine_groups._groups.clear()
        threading.Thread(target=closing.clear, daemon=True).start()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _report(error: BaseException) -> Outcome:
    # The frames of this file are the same for every test.
    tb: TracebackType | None = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == __file__ and tb.tb_next is not None:
        tb = tb.tb_next
    text = "".join(traceback.TracebackException(type(error), error, tb).format())
    return Outcome(type(error).__name__, text)


def _rewrite_asserts() -> None:
    """Let asserts in test modules show their values, as in the test process."""
    # Not public in pytest. Without it asserts only show their source, hence the silence.
    with contextlib.suppress(Exception):
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config()).mark_rewrite("tests")


def call_body(
    rank: int, world_size: int, module: str, name: str, wanted: tuple[str, ...], kwargs: dict[str, Any]
) -> None:
    """Run the body of a test that is decorated with :func:`ranks`."""
    body = getattr(importlib.import_module(module), name).rank_body
    ours = {"rank": rank, "world_size": world_size}
    kwargs.update({name: value for name, value in ours.items() if name in wanted})
    if "device" in kwargs:
        kwargs["device"] = _rank_device(kwargs["device"], rank)
    try:
        body(**kwargs)
    finally:  # a copy of pytest's fixture, which is undone in the test process only
        for value in kwargs.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()


def _rank_device(device: str, rank: int) -> torch.device:
    if device != "cuda":
        return torch.device(device)
    index = rank % torch.cuda.device_count()  # ranks share a GPU where there are too few
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
