"""A checkpoint appears in one step, and old ones go when the new one is whole: kills at any moment, leftovers, retention."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.checkpoint.helpers import alone, build, comes_back, files_of, load, same, save, train, whole
from tests.support.odd_model import Net
from tests.support.ranks import ranks
from torch_shard.checkpoint.format import atomic_directory
from torch_shard.checkpoint.format.atomic_directory import Saving, commit, find
from torch_shard.checkpoint.sharded.checkpoint_dir import Checkpoint
from torch_shard.checkpoint.tools.verify import verify
from torch_shard.errors import CheckpointError

ROOT = Path(__file__).parents[2]
NONCE = "0123456789abcdef"


@ranks(2)
def test_nothing_else_remains(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    for first in (True, False):
        train(model, optimizer, rank, range(1))
        save(engine, tmp_path / "deep" / "c", optimizer)
        assert files_of(tmp_path / "deep") == ["c"]
        assert files_of(tmp_path / "deep" / "c") == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
        dist.barrier()
        if first and rank == 0:
            (tmp_path / "deep" / "c" / "__7_0.distcp").touch()  # as of more ranks
        dist.barrier()
    comes_back(tmp_path / "deep" / "c", engine, optimizer, model=Net)


@ranks(2)
def test_a_dead_saves_leftovers_are_removed_by_the_next(rank, tmp_path):
    _model, engine = alone()
    if rank == 0:
        (tmp_path / f".c.saving-{NONCE}").mkdir()
        (tmp_path / f".c.saving-{NONCE}" / "__0_0.distcp").touch()
        other = tmp_path / f".step-7.saving-{NONCE}"
        other.mkdir()
        os.utime(other, (1, 1))
        (tmp_path / ".mine.saving-x").mkdir()
        young = tmp_path / f".step-8.saving-{NONCE}"
        young.mkdir()
    dist.barrier()
    save(engine, tmp_path / "c")
    assert files_of(tmp_path) == sorted(["c", ".mine.saving-x", f".step-8.saving-{NONCE}"])
    save(engine, tmp_path / "step-9", keep=1)  # of the same sequence
    assert files_of(tmp_path) == sorted(["c", ".mine.saving-x", "step-9"])


@ranks(2)
def test_a_checkpoint_that_lost_its_name_between_two_renames_is_found_and_gets_it_back(rank, tmp_path):
    _model, engine, optimizer = build(model=Net)
    save(engine, tmp_path / "c", optimizer)
    if rank == 0:
        os.rename(tmp_path / "c", tmp_path / f".c.previous-{NONCE}")
    dist.barrier()
    load(engine, tmp_path / "c", optimizer)
    dist.barrier()
    save(engine, tmp_path / "c", optimizer)
    assert files_of(tmp_path) == ["c"]


def test_without_an_exchange_in_one_step_the_old_one_steps_aside(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_directory, "exchange", lambda one, other: False)
    for nonce, text in ((NONCE, "one"), (NONCE[::-1], "two")):
        saving = Saving.begin(tmp_path / "c", nonce)
        (saving.path / "manifest.json").write_text(text)
        commit(saving, tmp_path / "c")
        saving.close()
        assert (find(tmp_path / "c") / "manifest.json").read_text() == text
        assert files_of(tmp_path) == ["c"]


@ranks(2)
def test_a_link_is_replaced_and_what_it_leads_to_stays(rank, tmp_path):
    _model, engine = alone()
    save(engine, tmp_path / "step-1")
    if rank == 0:
        (tmp_path / "last").symlink_to("step-1")
    dist.barrier()
    load(engine, tmp_path / "last")
    dist.barrier()
    save(engine, tmp_path / "last")
    assert not (tmp_path / "last").is_symlink()
    assert files_of(tmp_path) == ["last", "step-1"]
    load(engine, tmp_path / "step-1")


def test_without_a_process_group(tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, 0, range(2))
    save(engine, tmp_path / "c", optimizer, extra=1)
    _again, other, second = build(seed=1, model=Net)
    assert load(other, tmp_path / "c", second) == 1
    same(whole(other, second), whole(engine, optimizer))


# -- retention --------------------------------------------------------------------------------------------------------


@ranks(2)
def test_the_newest_are_kept(rank, tmp_path):
    """Of those whose names differ in their last number."""
    _model, engine = alone()
    if rank == 0:
        (tmp_path / "step-0").mkdir()
        (tmp_path / "step-0" / "notes.txt").touch()
        (tmp_path / "step-best").mkdir()
    dist.barrier()
    # 7 is saved again: what counts is when.
    for step in (7, 8, 9, 7, 10):
        save(engine, tmp_path / f"step-{step}", keep=2)
    for other in ("7b-step-1", "13b-step-1", "13b-step-2"):
        save(engine, tmp_path / other, keep=1)
    assert files_of(tmp_path) == ["13b-step-2", "7b-step-1", "step-0", "step-10", "step-7", "step-best"]
    load(engine, tmp_path / "step-7")


@ranks(2)
def test_a_save_that_fails_deletes_nothing(rank, tmp_path):
    _model, engine = alone()
    for step in (1, 2):
        save(engine, tmp_path / f"step-{step}")
    with pytest.raises(CheckpointError):
        save(engine, tmp_path / "step-3", extra=object(), keep=1)
    dist.barrier()  # rank 0 tidies up
    assert files_of(tmp_path) == ["step-1", "step-2"]


# -- kills ------------------------------------------------------------------------------------------------------------


def killed(path: Path, count: int, seed: int, *arguments: str) -> None:
    """Processes that save one checkpoint after the other are killed, all of them; then the newest loads and verifies."""
    generator = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    before, changed, log = -1, 0, path / "log"
    command = [sys.executable, "-m", "tests.checkpoint.saver", str(path), *arguments]
    with (
        open(log, "wb") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as saver,
    ):
        assert saver.stdin is not None and saver.stdout is not None
        for _ in range(count):
            saver.stdin.write("again\n")
            saver.stdin.flush()
            group = int(saver.stdout.readline() or "0")
            assert group, log.read_text()
            try:
                deadline = time.monotonic() + 60
                while not (path / "running").exists():
                    assert time.monotonic() < deadline, log.read_text()
                    time.sleep(0.01)
                (path / "running").unlink()
                time.sleep(generator.uniform(0.0, 0.4))
            finally:
                os.killpg(group, signal.SIGKILL)
            assert saver.stdout.readline() == "gone\n"  # the last write of a killed process may still be under way
            if (path / "c").exists() or before >= 0:
                found = verified(path / "c")
                assert found >= before, (found, before)  # never an older one
                changed += found > before
                before = found
        saver.stdin.close()
    assert changed or count < 5


def verified(target: Path) -> int:
    """Every byte of a checkpoint is as it was written; returns the step that it holds."""
    assert verify(target) == []
    step: int = Checkpoint.open(target).read({}, ["extra"])["extra"]
    return step


@pytest.mark.exhaustive
def test_killed_with_offload_the_newest_checkpoint_is_whole_and_nothing_else_is_left(tmp_path):
    killed(tmp_path, 20, 1, "offload")
    assert list((tmp_path / "state").iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [5, 200])
def test_killed_at_a_random_moment_the_newest_checkpoint_is_whole(count, tmp_path):
    killed(tmp_path, count, seed=count)
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
