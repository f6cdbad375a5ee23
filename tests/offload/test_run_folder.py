"""A directory that ranks of one run share: each has a folder there, which goes with its process, and other runs are refused."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from tests.support.run_python import run_python
from torch_shard.errors import DiskError
from torch_shard.offload import run_folder
from torch_shard.offload.disk import DiskStore
from torch_shard.offload.run_folder import RunFolder, locks_reach_other_hosts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

PROGRAM = ("-m", "tests.offload.disk_runs")
fork = get_context("fork")  # the processes need not import everything again


def holder(directory: Path, name: str, answer: Connection, with_child: bool) -> None:
    store = DiskStore(directory, run=name, rank=3)
    state = store.allocate("state", 1 << 16, torch.float32).fill_(7.0)
    child = 0
    read, write = os.pipe()
    if with_child and (child := os.fork()) == 0:
        os.write(write, b"1")  # it runs: what is done in a child behind a fork is done
        time.sleep(60)
        os._exit(0)
    if with_child:
        os.read(read, 1)
    answer.send((store.path, child))
    time.sleep(60)
    del state


@contextmanager
def held(directory: Path, name: str, with_child: bool = False) -> Iterator[tuple[BaseProcess, Path, int]]:
    """A process of run `name`, rank 3, that holds a folder in the directory; the folder; the process's own child."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=holder, args=(directory, name, theirs, with_child))
    process.start()
    try:
        assert ours.poll(30)
        yield process, *ours.recv()
    finally:
        process.kill()
        process.join()


def in_child(function: Callable[[], str]) -> str:
    """What it returns, or raises as DiskError, in a forked child."""

    def body(answer: Connection) -> None:
        try:
            answer.send(function())
        except DiskError as error:
            answer.send(f"DiskError: {error}")

    ours, theirs = fork.Pipe()
    process = fork.Process(target=body, args=(theirs,))
    process.start()
    assert ours.poll(30)
    text = ours.recv()
    process.join()
    return text


def test_another_run_is_refused_while_the_first_one_lives(tmp_path):
    with held(tmp_path, "first") as (process, folder, _):
        with pytest.raises(DiskError) as raised:
            DiskStore(tmp_path, run="second", rank=0)
        for part in (
            str(tmp_path),
            "another run",
            f"process {process.pid}",
            os.uname().nodename,
            "its rank 3",
            folder.name,
        ):
            assert part in str(raised.value)
        assert {p.name for p in tmp_path.iterdir()} == {folder.name, ".torch-shard.lock"}  # nothing new, nothing gone
        with DiskStore(tmp_path, run="first", rank=0):  # another rank of the same run
            assert len(list(tmp_path.glob("torch-shard-*"))) == 2


def test_what_a_killed_run_left_is_deleted_by_the_next(tmp_path):
    with held(tmp_path, "first") as (process, folder, _):
        assert (folder / "lock").exists() and len(list(folder.iterdir())) == 2
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL and folder.exists()
        with DiskStore(tmp_path, run="second", rank=0) as store:
            assert not folder.exists() and list(tmp_path.glob("torch-shard-*")) == [store.path]


def test_a_child_that_outlives_its_killed_parent_does_not_keep_the_folder(tmp_path):
    with held(tmp_path, "first", with_child=True) as (process, folder, child):
        process.kill()
        process.join()
        try:
            with DiskStore(tmp_path, run="second", rank=0):
                assert not folder.exists()
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(("what", "expected"), exhaustive(("exit", 0), ("raise", 1)))
def test_the_folder_is_deleted_at_exit(tmp_path, what, expected):
    done = run_python(*PROGRAM, what, tmp_path, "a", expected=expected)
    assert done.stdout.startswith(str(tmp_path / "torch-shard-rank3-"))
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_deleted_at_the_exit_of_a_process_of_multiprocessing(tmp_path):
    """Those that are forked run none of Python's exit functions."""
    kept = []

    def body() -> str:
        kept.append(DiskStore(tmp_path, run="a", rank=0))
        return kept[0].path.name

    assert in_child(body).startswith("torch-shard-rank0-")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_goes_with_the_store(tmp_path):
    store = DiskStore(tmp_path, run="a", rank=0)
    state = store.allocate("state", 100, torch.float32)
    store.write_behind([state])
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    assert not state.any()


@pytest.mark.exhaustive
def test_a_forked_child_that_exits_leaves_its_parents_folder_which_goes_at_its_own_exit(tmp_path):
    assert "kept" in run_python(*PROGRAM, "fork", tmp_path, "a").stdout
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_can_read_and_is_told_that_it_can_do_no_more(tmp_path):
    with DiskStore(tmp_path, run="a", rank=0) as store:
        state = store.allocate("state", 100, torch.float32).fill_(5.0)
        assert in_child(lambda: str(state.sum().item())) == "500.0"
        text = in_child(lambda: str(store.read_ahead([state])))
        assert f"belongs to process {os.getpid()}" in text
        assert in_child(lambda: str(store.close())) == "None"
        assert (store.path / "lock").exists()


@ranks(2)
def test_ranks_of_a_run_share_a_directory(rank, tmp_path):
    with DiskStore(tmp_path, run="a") as store:
        torch.distributed.barrier()
        assert store.rank == rank and f"rank{rank}-" in store.path.name
        assert len(list(tmp_path.glob("torch-shard-*"))) == 2
        torch.distributed.barrier()
    torch.distributed.barrier()
    assert list(tmp_path.iterdir()) == []


def begin(rank: int, world_size: int, directory: Path) -> list[str]:
    """The first half of the ranks is a run, the second half another, and all begin at once."""
    name = "ab"[2 * rank // world_size]
    outcome = []
    for attempt in range(15):
        torch.distributed.barrier()
        with ExitStack() as until_all_have_tried:
            try:
                until_all_have_tried.enter_context(DiskStore(directory / str(attempt), run=name))
                outcome.append("in")
            except DiskError as error:
                outcome.append(str(error))
            torch.distributed.barrier()
    return outcome


@pytest.mark.parametrize("world_size", [2, *exhaustive(4)])
def test_of_two_runs_that_begin_at_once_one_wins_whole(tmp_path, world_size):
    half = world_size // 2
    for outcomes in zip(*run(world_size, begin, tmp_path), strict=True):
        first, second = outcomes[:half], outcomes[half:]
        winners, losers = (first, second) if first[0] == "in" else (second, first)
        assert set(winners) == {"in"} and all("used by another run" in text for text in losers)


def test_two_stores_of_one_process_are_one_run(tmp_path):
    with DiskStore(tmp_path, run="a", rank=0) as one, DiskStore(tmp_path, run="a", rank=0) as other:
        assert one.path != other.path


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "torch-shard-rank0-notes").mkdir()
    (tmp_path / "torch-shard-rank0-00000000").write_text("a file")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text("{}")
    (tmp_path / "torch-shard-rank0-11111111").symlink_to(elsewhere)
    without_lock = tmp_path / "torch-shard-rank0-22222222"
    without_lock.mkdir()
    (without_lock / "data").write_text("data")
    (tmp_path / "torch-shard-rank0-33333333").mkdir()  # of a process that was killed at its very beginning
    DiskStore(tmp_path, run="a", rank=0).close()
    left = {p.name for p in tmp_path.iterdir()} - {".torch-shard.lock"}
    assert left == {
        "torch-shard-rank0-notes",
        "torch-shard-rank0-00000000",
        "torch-shard-rank0-11111111",
        "torch-shard-rank0-22222222",
        "elsewhere",
    }
    assert (elsewhere / "lock").exists() and (without_lock / "data").exists()


def leave(directory: Path, **about: object) -> Path:
    folder = directory / "torch-shard-rank5-0123abcd"
    folder.mkdir()
    (folder / "lock").write_text(json.dumps(about))
    return folder


def test_a_free_lock_of_another_host_is_trusted_only_where_locks_reach_other_hosts(tmp_path, monkeypatch):
    folder = leave(tmp_path, run="x", rank=5, pid=4242, host="far-away", machine="another boot")
    monkeypatch.setattr(run_folder, "file_system", lambda path: ("fuse.sshfs", "rw"))
    with pytest.raises(DiskError, match=r"process 4242 on host far-away.*within each host only"):
        RunFolder(tmp_path, "a", 0)
    assert folder.exists()
    monkeypatch.undo()
    RunFolder(tmp_path, "a", 0).close()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("nfs4", "rw,vers=4.2,local_lock=none,addr=10.0.0.1", True),
        ("nfs", "rw,vers=3,local_lock=all,addr=10.0.0.1", False),
        ("lustre", "rw,flock", True),
        ("lustre", "rw,localflock", False),
        ("ext4", "rw", True),
        ("fuse.sshfs", "rw", False),
    ],
)
def test_where_locks_reach_other_hosts(kind, options, expected):
    assert locks_reach_other_hosts(kind, options) is expected


def test_a_directory_that_can_not_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"rank 2: nvme='.*/file' can't be used: File exists"):
        DiskStore(tmp_path / "file", run="a", rank=2)
    with pytest.raises(DiskError, match="can't be used: Not a directory"):
        DiskStore(tmp_path / "file/below", run="a", rank=2)


def test_the_folder_of_another_user_is_taken_for_a_live_run():
    if os.getuid() != 0:
        pytest.skip("needs root")

    def as_nobody() -> str:
        os.setgid(65534)
        os.setuid(65534)
        return str(DiskStore(directory, run="a", rank=0))

    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        with DiskStore(directory, run="a", rank=0) as store:
            assert "Permission denied" in in_child(as_nobody)
            os.chmod(Path(directory, ".torch-shard.lock"), 0o666)
            text = in_child(as_nobody)
        assert "folder of another user" in text and store.path.name in text and "uid 0" in text


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def no_locks(fd: int, what: int) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    with pytest.raises(DiskError, match=r"keeps no locks \(Function not implemented\).*local disk"):
        DiskStore(tmp_path, run="a", rank=0)
    assert not list(tmp_path.glob("torch-shard-*"))


def test_a_process_that_keeps_the_directory_to_itself_is_named_in_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "_PATIENCE", 0.1)
    with (
        run_folder._guarded(tmp_path, 0.1),
        pytest.raises(DiskError, match="End that process"),
        run_folder._guarded(tmp_path, 0.1),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_just_before_it_was_taken_is_none(tmp_path, monkeypatch):
    take, calls = run_folder._lock, []

    def take_late(fd: int, path: Path) -> bool:
        calls.append(path)
        if len(calls) == 1:  # who held it was the last one in the directory
            path.unlink()
        return take(fd, path)

    monkeypatch.setattr(run_folder, "_lock", take_late)
    with run_folder._guarded(tmp_path, 0.1):
        assert len(calls) == 2
        with pytest.raises(DiskError), run_folder._guarded(tmp_path, 0.1):
            pass
