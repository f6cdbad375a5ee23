"""``engine.save(..., asynchronous=True)``: training goes on, and what is saved is what was there at the call."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.helpers import alone, build, files_of, load, same, save, train, whole
from tests.checkpoint.test_one_step import verified
from tests.support.marks import exhaustive
from tests.support.odd_model import Net
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from torch_shard.checkpoint.sharded import save as sharded_save
from torch_shard.checkpoint.sharded.host_snapshot import SnapshotMemory
from torch_shard.errors import CheckpointError, MissingRankError, ShardError

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def writing(fails: bool = False) -> Iterator[threading.Event]:
    """Files are written when the event is set, or writing them fails then."""
    original, event = sharded_save.write_file, threading.Event()

    def later(folder, plan, resolve):
        assert event.wait(30)
        if fails:
            raise OSError(28, "No space left on device")
        return original(folder, plan, resolve)

    sharded_save.write_file = later
    try:
        yield event
    finally:
        event.set()
        sharded_save.write_file = original


@ranks(2, exhaustive=(1, 4))
def test_what_is_saved_is_what_was_there_at_the_call(rank, tmp_path):
    model, engine, optimizer = build()
    train(model, optimizer, rank, range(2))
    expected, extra = whole(engine, optimizer), {"steps": [2]}
    with writing() as event:
        pending = save(engine, tmp_path / "c", optimizer, extra=extra, asynchronous=True)
        extra["steps"].append(3)
        train(model, optimizer, rank, range(2, 4))
        optimizer.param_groups[0]["lr"] = 1.0
        with torch.no_grad():
            model.norm.running_mean.add_(1)
        assert not pending.done() and not (tmp_path / "c").exists()
        event.set()
        pending.wait()
    assert pending.done()
    _again, other, second = build(seed=1)
    assert load(other, tmp_path / "c", second) == {"steps": [2]}
    found = whole(other, second)
    if rank == 0:  # of buffers, rank 0's are saved
        same(found, expected)
    assert verified(tmp_path / "c") == {"steps": [2]} and files_of(tmp_path) == ["c"]


@ranks(2)
def test_the_next_save_waits_and_both_are_whole(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    with writing() as event:
        save(engine, tmp_path / "step-1", optimizer, extra=1, asynchronous=True)
        train(model, optimizer, rank, range(1))
        threading.Timer(0.3, event.set).start()
        save(engine, tmp_path / "step-2", optimizer, extra=2, asynchronous=True)
        assert (tmp_path / "step-1").is_dir()
        engine.finish_saving()
    assert verified(tmp_path / "step-1") == 1 and verified(tmp_path / "step-2") == 2
    save(engine, tmp_path / "step-3", keep=1, asynchronous=True)
    assert load(engine, tmp_path / "step-3") is None  # waits
    assert files_of(tmp_path) == ["step-3"]


@pytest.mark.parametrize("call", ["save", *exhaustive("load", "close"), "finish_saving"])
@ranks(2)
def test_a_failure_on_one_rank_is_raised_by_the_next_call_on_all(rank, call, tmp_path):
    model, engine, optimizer = build(model=Net)
    save(engine, tmp_path / "c", extra="old")
    with writing(fails=rank == 1) as event:
        save(engine, tmp_path / "c", asynchronous=True)
        event.set()
        train(model, optimizer, rank, range(1))
        before = whole(engine)
        calls = {
            "save": lambda: save(engine, tmp_path / "d"),
            "load": lambda: load(engine, tmp_path / "c"),
            "close": engine.close,
            "finish_saving": engine.finish_saving,
        }
        with pytest.raises(CheckpointError, match=r"c failed: rank 1: .*No space left"):
            calls[call]()
    dist.barrier()
    same(whole(engine), before)
    assert files_of(tmp_path) == ["c"] and verified(tmp_path / "c") == "old"
    save(engine, tmp_path / "d", extra="new", asynchronous=True)  # raised once
    engine.close()
    assert verified(tmp_path / "d") == "new"


@pytest.mark.exhaustive
def test_a_wait_that_is_interrupted_can_be_waited_for_again(tmp_path):
    model, engine, optimizer = build(model=Net)
    expected = whole(engine)
    with writing() as event:
        pending = save(engine, tmp_path / "c", extra=1, asynchronous=True)
        threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            engine.finish_saving()
        assert not pending.done()
        train(model, optimizer, 0, range(1))
        threading.Timer(0.3, event.set).start()
        save(engine, tmp_path / "d", asynchronous=True)  # into the same memory, so not before the first is written
        engine.finish_saving()
    assert pending.done()
    load(engine, tmp_path / "c")
    same(whole(engine), expected)


@ranks(2)
def test_one_rank_may_wait_by_itself_before_all_close(rank, tmp_path):
    _model, engine = alone()
    save(engine, tmp_path / "c", extra=1, asynchronous=True)
    if rank == 0:
        engine.finish_saving()
    engine.close()
    assert verified(tmp_path / "c") == 1


@ranks(2)
def test_a_thread_that_does_not_start_on_one_rank_fails_on_all(rank, tmp_path):
    _model, engine, _ = build(model=Net, timeout=5.0)
    original = threading.Thread.start

    def fails(thread):
        if rank == 1 and "save of" in thread.name:
            raise RuntimeError("can't start new thread")
        original(thread)

    threading.Thread.start = fails
    try:
        with pytest.raises((RuntimeError, ShardError), match="can't start new thread"):
            save(engine, tmp_path / "c", asynchronous=True)
    finally:
        threading.Thread.start = original
    dist.barrier()
    assert files_of(tmp_path) == []
    assert not [t for t in threading.enumerate() if t.name.startswith("torch_shard save")]
    save(engine, tmp_path / "c", extra=1, asynchronous=True)
    engine.finish_saving()
    assert verified(tmp_path / "c") == 1


@pytest.mark.exhaustive
@ranks(2)
def test_a_long_wait_in_the_store_does_not_silence_the_save(rank, tmp_path):
    _model, engine, _ = build(model=Net, timeout=2.0)
    with writing() as event:
        save(engine, tmp_path / "c", extra=1, asynchronous=True)
        event.set()
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            time.sleep(4.5)
            store.set("here", "x")
        store.wait(["here"])
    engine.finish_saving()
    assert verified(tmp_path / "c") == 1


def test_what_is_put_beside_it_meanwhile_stays(tmp_path):
    _model, engine = alone()
    with writing() as event:
        save(engine, tmp_path / "c", extra=1, asynchronous=True)
        (tmp_path / "c").mkdir()
        (tmp_path / "c" / "tokenizer.json").write_text("{}")
        event.set()
        engine.finish_saving()
    assert "tokenizer.json" in files_of(tmp_path / "c") and verified(tmp_path / "c") == 1


@ranks(2)
def test_saves_leave_nothing_behind_in_the_store(rank, tmp_path):
    _model, engine = alone()
    store = dist.distributed_c10d._get_default_store()
    left = []
    for number in range(6):
        save(engine, tmp_path / "c", asynchronous=number % 2 == 0)
        engine.finish_saving()
        dist.barrier()
        # A rank that waits long says so, in a key of its own that stays for the next time.
        left.append({key for key in store.list_keys() if not re.search(r"torch_shard/shard/.*/\d+/\d+/\d+$", key)})
        dist.barrier()
    assert left[-1] == left[1], left[-1] ^ left[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_a_slow_disk_is_no_missing_rank(asynchronous, rank, tmp_path):
    _model, engine, _ = build(model=Net, timeout=1.0)
    with writing() as event:
        threading.Timer(3.0 if rank else 0.0, event.set).start()
        save(engine, tmp_path / "c", extra=1, asynchronous=asynchronous)
        engine.finish_saving()
    assert verified(tmp_path / "c") == 1


@pytest.mark.exhaustive
@ranks(2, fresh=True, may_die=(1,))
def test_a_rank_that_is_gone_is_missed(rank, tmp_path):
    import os

    _model, engine, _ = build(model=Net, timeout=1.5)
    with writing() as event:
        save(engine, tmp_path / "c", asynchronous=True)
        if rank == 1:
            os._exit(0)
        event.set()
        with pytest.raises(CheckpointError, match="rank 1"):
            engine.finish_saving()
    assert files_of(tmp_path) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["works", "fails"])
def test_a_program_that_ends_loses_nothing(kind, tmp_path):
    program = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.checkpoint.leaver")
    done = run_python(*program, tmp_path, kind, folder=ROOT)
    if kind == "fails":
        assert files_of(tmp_path) == ["expected"]
        assert done.stderr.count("no space left") >= 2, done.stderr  # each rank says so
        return
    assert files_of(tmp_path) == ["c", "expected"]
    _model, engine, optimizer = build(seed=1, model=Net)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), torch.load(tmp_path / "expected", weights_only=True))


def test_memory_of_a_snapshot_is_used_again():
    staging = SnapshotMemory()
    first = [torch.randn(1000), torch.randn(3, 5).t(), torch.tensor(2), torch.empty(0), torch.ones(7, dtype=torch.bool)]
    copies = staging.snapshot([*first, first[0]])
    same(copies, [*first, first[0]])
    assert copies[0].data_ptr() == copies[-1].data_ptr() != first[0].data_ptr()
    kept, held = copies[0].data_ptr(), staging.nbytes
    second = [t.clone() + 1 if t.dtype != torch.bool else ~t for t in first]
    copies = staging.snapshot(second)
    same(copies, second)
    assert copies[0].data_ptr() == kept and staging.nbytes == held
    staging.free()
    assert staging.nbytes == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("asynchronous", [False, True])
@ranks(2)
def test_a_rank_that_does_not_come_is_missed(asynchronous, rank, tmp_path):
    _model, engine, _ = build(model=Net, timeout=1.5)
    if rank == 0:
        with pytest.raises(MissingRankError, match=r"engine\.save"):
            save(engine, tmp_path / "c", asynchronous=asynchronous)
        assert files_of(tmp_path) == []
    else:
        time.sleep(4.0)
