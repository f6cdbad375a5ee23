"""Tensors in files: exact whatever is read ahead or written behind, and in memory for a few units at a time only."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from torch_shard.errors import DiskError, ShardError, UnavailableError
from torch_shard.offload import paging
from torch_shard.offload.disk import DiskStore
from torch_shard.offload.run_folder import file_system

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

MIB = 1 << 20
UNIT = 4 * MIB


@pytest.fixture
def store(tmp_path):
    with DiskStore(tmp_path / "nvme", run="a", rank=0) as made:
        yield made


def units(store: DiskStore, number: int) -> list[torch.Tensor]:
    return [store.allocate(f"unit {n}", UNIT // 4, torch.float32) for n in range(number)]


def on_disk(tmp_path: Path) -> bool:
    return file_system(tmp_path)[0] not in ("tmpfs", "ramfs")


def test_a_new_tensor_is_zeros_of_its_dtype_in_a_file_of_its_size(store):
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn):
        t = store.allocate(f"exp_avg of a/b.{dtype}", 1001, dtype)
        assert (t.shape, t.dtype, t.device.type) == ((1001,), dtype, "cpu")
        assert not t.to(torch.float32).any()
        (file,) = [f for f in store.path.iterdir() if str(dtype) in f.name]
        assert file.stat().st_size == t.nbytes and file.stat().st_blocks * 512 >= t.nbytes
    assert store.allocate("empty", 0, torch.float32).numel() == 0


@pytest.mark.parametrize("for_writing", [True, False])
def test_contents_survive_bit_for_bit(store, for_writing):
    torch.manual_seed(0)
    states = units(store, 4)
    expected = [torch.randn(UNIT // 4) for _ in states]
    for state, value in zip(states, expected, strict=True):
        state.copy_(value)
    for _ in range(3):
        for state, value in zip(states, expected, strict=True):
            store.read_ahead([state], for_writing=for_writing)
            store.wait([state])
            assert torch.equal(state, value)
            state.mul_(-1.5)
            value.mul_(-1.5)
            store.write_behind([state])
    store.flush()
    assert all(torch.equal(state, value) for state, value in zip(states, expected, strict=True))


def test_contents_are_exact_at_any_moment(store):
    """Used while it is written, dropped, and read again by the threads, without waiting for them."""
    states = units(store, 3)
    expected = [0.0] * 3
    for step in range(40):
        n = step % 3
        store.read_ahead([states[(n + 1) % 3]])
        assert states[n].min() == states[n].max() == expected[n]
        states[n].add_(1.0)
        expected[n] += 1.0
        store.write_behind([states[n]])
        states[n].add_(1.0)
        expected[n] += 1.0
    assert [t.max().item() for t in states] == [t.min().item() for t in states] == expected


def test_memory_is_given_back_behind_and_taken_ahead(store, tmp_path):
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    states = units(store, 2)
    assert store.resident_bytes() == 0
    for state in states:
        state.fill_(1.0)
    assert store.resident_bytes() == 2 * UNIT
    store.write_behind(states[:1])
    store.flush()
    assert store.resident_bytes() == UNIT
    assert mapped(store.path) == UNIT
    store.read_ahead(states[:1])
    store.wait(states[:1])
    assert store.resident_bytes() == mapped(store.path) == 2 * UNIT


def mapped(folder: Path) -> int:
    """Bytes of files in `folder` that count as this process's resident memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.parametrize("behind", [1, 2])
def test_however_many_units_a_stated_number_is_in_memory(tmp_path, behind):
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    peak = 0
    with DiskStore(tmp_path, run="a", rank=0, behind=behind) as store:
        states = units(store, 12)
        for _ in range(2):
            store.read_ahead(states[:1])
            for n, state in enumerate(states):
                store.read_ahead(states[n + 1 : n + 2])
                store.wait([state])
                state.add_(1.0)
                peak = max(peak, store.resident_bytes())
                store.write_behind([state])
                peak = max(peak, store.resident_bytes())
        store.flush()
        assert store.resident_bytes() == 0
        assert all(state.min() == state.max() == 2.0 for state in states)
        assert store.transferred.read == store.transferred.written == 24 * UNIT
    assert UNIT < peak <= (behind + 2) * UNIT


def test_a_slow_disk_is_waited_for(store, monkeypatch):
    """What is written behind may not pile up in memory."""
    fast, unfinished = paging.write_out, []

    def slow(fd):
        time.sleep(0.05)
        fast(fd)

    monkeypatch.setattr(paging, "write_out", slow)
    for calls, state in enumerate(units(store, 6), 1):
        state.fill_(1.0)
        store.write_behind([state])
        unfinished.append(calls - store.transferred.written // UNIT)
    assert max(unfinished) == store.behind
    store.flush()
    assert store.transferred.waited > 0.15


def test_what_is_read_ahead_again_before_it_was_written_stays_in_memory(store, tmp_path, monkeypatch):
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder lies in memory")
    fast, may_write = paging.write_out, threading.Event()
    monkeypatch.setattr(paging, "write_out", lambda fd: (may_write.wait(30), fast(fd)))
    (state,) = units(store, 1)
    state.fill_(3.0)
    store.write_behind([state])
    store.read_ahead([state])
    may_write.set()
    store.flush()
    assert store.resident_bytes() == UNIT and state.min() == 3.0


def test_a_view_stands_for_its_tensor_and_strangers_are_refused(store):
    (state,) = units(store, 1)
    state.fill_(1.0)
    store.write_behind([state[5:10], state.view(2, -1)[1]])
    store.flush()
    assert store.transferred.written == UNIT
    for method in (store.read_ahead, store.wait, store.write_behind):
        with pytest.raises(ValueError, match="not allocated by the store"):
            method([torch.zeros(3)])


@pytest.mark.exhaustive
def test_the_space_of_a_tensor_that_is_gone_is_free_again(store):
    first, second = units(store, 2)
    second.fill_(2.0)
    view = first[3:]
    store.write_behind([first, second])
    del first
    store.flush()
    gc.collect()
    assert len(list(store.path.iterdir())) == 3 and store.transferred.allocated == 2 * UNIT
    del view
    gc.collect()
    assert len(list(store.path.iterdir())) == 2 and store.transferred.allocated == UNIT
    assert second.min() == 2.0


@pytest.mark.exhaustive
def test_tensors_that_go_while_they_are_read_and_written_do_no_harm(store):
    """A thread that works on pages that were unmapped, and mapped again by somebody else, would wipe them."""
    for _ in range(30):
        state = store.allocate("state", UNIT // 4, torch.float32)
        state.fill_(1.0)
        store.read_ahead([state])
        store.write_behind([state])
        del state
        other = torch.full((UNIT // 4,), 5.0)
        assert other.min() == 5.0
    store.flush()
    gc.collect()
    assert [f.name for f in store.path.iterdir()] == ["lock"] and other.min() == 5.0


def test_many_tensors_take_no_file_descriptors(store):
    before = len(os.listdir("/proc/self/fd"))
    states = [store.allocate(f"{n}", 10, torch.float32) for n in range(200)]
    for state in states:
        state.fill_(1.0)
    store.write_behind(states)
    store.flush()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_other_threads_run_while_pages_are_read(store):
    """Reading must not hold the interpreter: the lock of Python is let go of during the call."""
    (state,) = [store.allocate("large", 64 * MIB // 4, torch.float32)]
    state.fill_(1.0)
    store.write_behind([state])
    store.flush()
    assert isinstance(paging._libc(), ctypes.CDLL) and not isinstance(paging._libc(), ctypes.PyDLL)
    store.read_ahead([state])
    ticks = 0
    while not store._find([state])[0][0].reading.done():
        ticks += 1
    assert ticks > 10


# -- errors -----------------------------------------------------------------------------------------------------------


def check_still_works(store: DiskStore, kept: torch.Tensor) -> None:
    """An allocation that failed has changed nothing."""
    files = {f.name for f in store.path.iterdir()}
    assert len(files) == 2 and kept.min() == 9.0  # the lock and the first tensor's
    kept.add_(1.0)
    store.write_behind([kept])
    store.flush()
    assert kept.min() == 10.0
    assert store.allocate("little", 10, torch.float32).numel() == 10


def test_a_disk_that_is_full_is_an_error_when_the_tensor_is_made(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True)
    if done.returncode != 0:
        pytest.skip("may not mount a file system")
    try:
        with DiskStore(disk, run="a", rank=1) as store:
            kept = store.allocate("first", MIB // 8, torch.float32).fill_(9.0)
            with pytest.raises(DiskError) as raised:
                store.allocate("exp_avg of layers.3", MIB, torch.float32)
            text = str(raised.value)
            assert isinstance(raised.value, ShardError)
            for part in (
                "rank 1",
                "'exp_avg of layers.3'",
                "No space left",
                str(store.path),
                "needs 4.00 MiB",
                "512.00 KiB",
            ):
                assert part in text
            assert "KiB are free" in text  # what was taken in vain was given back
            check_still_works(store, kept)
            del kept
    finally:
        gc.collect()
        subprocess.run(["umount", "--lazy", disk], check=True)


def test_a_limit_on_the_size_of_files_is_an_error_when_the_tensor_is_made(store):
    kept = store.allocate("first", 1000, torch.float32).fill_(9.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(DiskError, match="File too large"):
            store.allocate("large", MIB, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    check_still_works(store, kept)


def test_a_quota_that_is_used_up_is_an_error_when_the_tensor_is_made(store, monkeypatch):
    kept = store.allocate("first", 1000, torch.float32).fill_(9.0)
    with monkeypatch.context() as patched, pytest.raises(DiskError, match="quota"):

        def refuse(*_):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

        patched.setattr(os, "posix_fallocate", refuse)
        store.allocate("large", MIB, torch.float32)
    check_still_works(store, kept)


def test_a_file_that_can_not_be_read_is_an_error_at_the_next_call_and_not_the_end_of_the_process(store):
    states = units(store, 2)
    states[1].fill_(2.0)
    (path,) = store.path.glob("*unit_0")
    os.truncate(path, 0)  # a touch of its pages would be SIGBUS now
    store.read_ahead(states)
    for method in (store.wait, store.write_behind, store.read_ahead):  # it stays broken
        with pytest.raises(DiskError, match=rf"rank 0: {path} can't be read"):
            method(states[:1])
    with pytest.raises(DiskError, match="can't be read"):
        store.allocate("another", 10, torch.float32)
    assert states[1].min() == 2.0  # for a last checkpoint


def test_a_file_that_can_not_be_written_is_an_error_at_the_next_call(store):
    states = units(store, 2)
    states[0].fill_(4.0)
    (path,) = store.path.glob("*unit_0")
    path.unlink()
    store.write_behind(states)
    with pytest.raises(DiskError, match=rf"rank 0: {path} can't be written: No such file"):
        store.flush()
    with pytest.raises(DiskError, match="can't be written"):
        store.read_ahead(states)
    assert states[0].min() == 4.0


def test_an_error_of_writing_keeps_the_pages_in_memory(store, tmp_path, monkeypatch):
    if not on_disk(tmp_path):
        pytest.skip("the temporary folder lies in memory")

    def broken(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (state,) = units(store, 1)
    state.fill_(4.0)
    monkeypatch.setattr(paging, "write_out", broken)
    store.write_behind([state])
    with pytest.raises(DiskError, match="Input/output error"):
        store.flush()
    assert store.resident_bytes() == UNIT and state.min() == 4.0


def test_on_a_kernel_that_can_not_map_pages_ahead_they_come_when_used(store, monkeypatch):
    (state,) = units(store, 1)
    state.fill_(6.0)
    store.write_behind([state])
    store.flush()
    monkeypatch.setattr(paging, "_POPULATE_WRITE", 12345)  # EINVAL, as before Linux 5.14
    store.read_ahead([state])
    store.wait([state])
    assert state.min() == 6.0


def test_a_closed_store_says_so_and_its_tensors_stay(store):
    (state,) = units(store, 1)
    state.fill_(8.0)
    store.close()
    store.close()
    assert not store.path.exists() and state.min() == 8.0
    with pytest.raises(DiskError, match="closed"):
        store.read_ahead([state])
    with pytest.raises(DiskError, match="closed"):
        store.allocate("more", 10, torch.float32)


def test_a_directory_in_memory_is_warned_of(tmp_path, caplog):
    if file_system(Path("/dev/shm"))[0] != "tmpfs":
        pytest.skip("needs /dev/shm")
    folder = Path(f"/dev/shm/{tmp_path.name}-{os.getpid()}")
    try:
        DiskStore(folder, run="a", rank=0).close()
    finally:
        folder.rmdir()
    assert "lies in memory (tmpfs)" in caplog.text


def test_other_systems_are_told_that_it_needs_linux(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match=r"\(nvme='.*'\) needs Linux; this is darwin"):
        DiskStore(tmp_path / "nvme", run="a", rank=0)
    assert not (tmp_path / "nvme").exists()
