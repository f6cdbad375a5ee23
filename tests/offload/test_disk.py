"""Tensors on disk: exact whatever is read ahead or written behind, in memory a few units at a time, and gone with the process."""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from tests.offload.residency import SPARE, resident
from tests.support.ranks import ranks
from torch_shard.config.offload import BEHIND, PAGED
from torch_shard.errors import DiskError, ShardError, UnavailableError
from torch_shard.offload import paging
from torch_shard.offload.disk import DiskStore

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

MIB = 1 << 20
UNIT = 4 * MIB


@pytest.fixture
def store(tmp_path):
    with closing(DiskStore(tmp_path / "nvme", rank=0)) as made:
        yield made


@pytest.fixture
def disk(tmp_path):
    """A directory with 16 MiB of space."""
    made = tmp_path / "disk"
    made.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", made], capture_output=True)
    if done.returncode != 0:
        pytest.skip("may not mount a file system")
    yield made
    gc.collect()
    subprocess.run(["umount", "--lazy", made], check=True)


def units(store: DiskStore, number: int) -> list[torch.Tensor]:
    return [store.allocate(f"unit {n}", UNIT // 4, torch.float32) for n in range(number)]


def flush(store: DiskStore) -> None:
    """Wait until the store's threads have nothing to do."""
    for pool in (store._reader, store._writer):
        pool.submit(int).result()


def in_memory(states: Iterable[torch.Tensor]) -> int:
    return sum(resident(s.untyped_storage().data_ptr(), s.untyped_storage().nbytes()) for s in states)


def free(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bfree * found.f_frsize


def test_a_new_tensor_is_zeros_of_its_dtype_and_has_its_space(disk):
    with closing(DiskStore(disk, rank=0)) as store:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.float8_e4m3fn):
            before = free(disk)
            t = store.allocate(f"exp_avg of a/b.{dtype}", 1001, dtype)
            assert t.nbytes <= before - free(disk) < t.nbytes + 65536
            assert (t.shape, t.dtype, t.device.type) == ((1001,), dtype, "cpu")
            assert not t.to(torch.float32).any()
            del t
        assert store.allocate("empty", 0, torch.float32).numel() == 0


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


def test_memory_is_given_back_behind_and_taken_ahead(store):
    states = units(store, 2)
    assert in_memory(states) == 0
    for state in states:
        state.fill_(1.0)
    assert in_memory(states) == 2 * UNIT
    store.write_behind(states[:1])
    flush(store)
    assert in_memory(states[1:]) == UNIT
    assert in_memory(states[:1]) <= SPARE
    store.read_ahead(states[:1])
    store.wait(states[:1])
    assert in_memory(states) == 2 * UNIT


@pytest.mark.parametrize("elements", [UNIT // 4, 3001])
def test_however_many_units_a_stated_number_is_in_memory(store, elements):
    peak = 0
    states = [store.allocate(f"unit {n}", elements, torch.float32) for n in range(12)]
    for _ in range(2):
        store.read_ahead(states[:1])
        for n, state in enumerate(states):
            store.read_ahead(states[n + 1 : n + 2])
            store.wait([state])
            state.add_(1.0)
            peak = max(peak, in_memory(states))
            store.write_behind([state])
            peak = max(peak, in_memory(states))
    flush(store)
    assert in_memory(states) <= SPARE
    assert 4 * elements < peak <= PAGED * 4 * elements + SPARE
    assert all(state.min() == state.max() == 2.0 for state in states)


def test_a_slow_disk_is_waited_for(store, monkeypatch):
    """What is written behind may not pile up in memory."""
    fast, written, unfinished = paging.write_out, [], []

    def slow(*part):
        time.sleep(0.05)
        fast(*part)
        written.append(part)

    monkeypatch.setattr(paging, "write_out", slow)
    for calls, state in enumerate(units(store, 6), 1):
        state.fill_(1.0)
        store.write_behind([state])
        unfinished.append(calls - len(written))
    assert max(unfinished) == BEHIND


@pytest.mark.exhaustive
def test_the_space_of_a_tensor_that_is_gone_is_free_again(disk):
    before = free(disk)
    with closing(DiskStore(disk, rank=0)) as store:
        first, second = units(store, 2)
        second.fill_(2.0)
        view = first[3:].fill_(7.0)
        store.write_behind([first, second])
        del first
        flush(store)
        gc.collect()
        assert before - free(disk) >= 2 * UNIT and store.allocated == 2 * UNIT
        del view
        gc.collect()
        assert UNIT <= before - free(disk) < 2 * UNIT and store.allocated == UNIT
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
    flush(store)
    gc.collect()
    assert store.allocated == 0 and other.min() == 5.0


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_an_error_when_the_tensor_is_made(disk):
    before = free(disk)
    with closing(DiskStore(disk, rank=1)) as store:
        kept = store.allocate("first", MIB // 8, torch.float32).fill_(9.0)
        with pytest.raises(DiskError) as raised:
            store.allocate("exp_avg of layers.3", 8 * MIB, torch.float32)
        text = str(raised.value)
        assert isinstance(raised.value, ShardError)
        for part in ("rank 1", "'exp_avg of layers.3'", "No space left", str(disk), "needs 32.00 MiB", "512.00 KiB"):
            assert part in text
        assert "15.50 MiB are free" in text  # what was taken in vain was given back
        assert before - free(disk) < MIB and kept.min() == 9.0
        kept.add_(1.0)
        store.write_behind([kept])
        flush(store)
        assert kept.min() == 10.0
        assert store.allocate("little", 10, torch.float32).numel() == 10
        del kept


def test_what_can_not_be_read_is_an_error_at_the_next_call_and_not_the_end_of_the_process(store):
    kept, state = units(store, 2)
    kept.fill_(2.0)
    cut_file_of(state)  # a touch of its pages would be SIGBUS now
    store.read_ahead([kept, state])
    for method in (store.wait, store.write_behind, store.read_ahead):  # it stays broken
        with pytest.raises(DiskError, match="rank 0: 'unit 1' can't be read from disk"):
            method([state])
    with pytest.raises(DiskError, match="can't be read"):
        store.allocate("another", 10, torch.float32)
    assert kept.min() == 2.0  # for a last checkpoint


def cut_file_of(state: torch.Tensor) -> None:
    start = f"{state.untyped_storage().data_ptr():x}-"
    (mapping,) = [name for name in os.listdir("/proc/self/map_files") if name.startswith(start)]
    try:
        os.truncate(f"/proc/self/map_files/{mapping}", 0)
    except PermissionError:
        pytest.skip("may not open mapped files")


def test_what_can_not_be_written_is_an_error_at_the_next_call_and_stays_in_memory(store, monkeypatch):

    def broken(*part):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (state,) = units(store, 1)
    state.fill_(4.0)
    monkeypatch.setattr(paging, "write_out", broken)
    with pytest.raises(DiskError, match="rank 0: 'unit 0' can't be written to disk: Input/output error"):
        store.write_behind([state])
        flush(store)
        store.read_ahead([state])
    assert in_memory([state]) == UNIT and state.min() == 4.0


def test_on_a_kernel_that_can_not_map_pages_ahead_they_come_when_used(store, monkeypatch):
    (state,) = units(store, 1)
    state.fill_(6.0)
    store.write_behind([state])
    flush(store)
    monkeypatch.setattr(paging, "_POPULATE_WRITE", 12345)  # EINVAL, as before Linux 5.14
    store.read_ahead([state])
    store.wait([state])
    assert state.min() == 6.0


# -- the directory ----------------------------------------------------------------------------------------------------


def in_child(function: Callable[[], object]) -> str:
    """What it returns, or raises as DiskError, in a forked child."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writing, str(function()).encode())
        except DiskError as error:
            os.write(writing, f"DiskError: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_nothing_has_a_name_and_the_space_of_a_killed_process_is_free(tmp_path):
    before = free(tmp_path)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            store = DiskStore(tmp_path, rank=3)
            state = store.allocate("state", 16 * MIB, torch.float32)
            os.write(writing, b"1")
            time.sleep(60)
            del state
        finally:
            os._exit(0)
    assert select.select([reading], [], [], 30)[0]
    assert list(tmp_path.iterdir()) == [] and before - free(tmp_path) > 32 * MIB
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    deadline = time.monotonic() + 20
    while before - free(tmp_path) > 32 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []
    os.close(reading)
    os.close(writing)


@ranks(2)
def test_ranks_and_runs_share_a_directory(rank, tmp_path):
    (tmp_path / "torch-shard-notes").write_text("what is not ours stays")
    stores = [DiskStore(tmp_path, rank=rank) for _ in range(2)]
    states = [store.allocate("state", 1000, torch.float32).fill_(10 * rank + n) for n, store in enumerate(stores)]
    for store, state in zip(stores, states, strict=True):
        store.write_behind([state])
        flush(store)
    torch.distributed.barrier()
    assert [int(state.unique()) for state in states] == [10 * rank, 10 * rank + 1]
    stores[0].close()
    assert states[1].min() == states[1].max() == 10 * rank + 1
    assert os.listdir(tmp_path) == ["torch-shard-notes"]
    stores[1].close()


def test_a_forked_child_can_read_and_is_told_that_it_can_do_no_more(store):
    held = [store.allocate("state", 100, torch.float32).fill_(5.0)]
    assert in_child(lambda: held[0].sum().item()) == "500.0"
    assert f"belongs to process {os.getpid()}" in in_child(lambda: store.read_ahead(held))
    assert in_child(store.close) == "None"
    in_child(lambda: held.clear() or gc.collect())  # its parent's stays
    store.write_behind(held)
    flush(store)
    assert held[0].sum() == 500.0


def test_a_directory_that_can_not_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match=r"rank 2: nvme='.*/file' can't be used: File exists"):
        DiskStore(tmp_path / "file", rank=2)
    with pytest.raises(DiskError, match="can't be used: Not a directory"):
        DiskStore(tmp_path / "file/below", rank=2)
    with pytest.raises(DiskError, match=r"can't be used: .*\(/proc/self.*\)\. Name a directory"):
        DiskStore("/proc/self", rank=2)


def test_other_systems_are_told_that_it_needs_linux(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(UnavailableError, match=r"\(nvme='.*'\) needs Linux; this is darwin"):
        DiskStore(tmp_path / "nvme", rank=0)
    assert not (tmp_path / "nvme").exists()
