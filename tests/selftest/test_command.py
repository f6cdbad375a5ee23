"""The command as a program: what it exits with, what it says, and what it leaves out of its report."""

from __future__ import annotations

import getpass
import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.run_python import run_python
from torch_shard.cli import main
from torch_shard.selftest import devices
from torch_shard.selftest.cases import cases_of
from torch_shard.selftest.session import checked_setting
from torch_shard.versions import __version__

# What the interpreter of each rank runs first: the engine of a self-test, spoiled.
SPOILED = """
import os, sys
if "torch_shard.selftest.worker" in sys.orig_argv:
    from torch_shard.selftest import correctness
    shard, compare = correctness.shard, correctness.train_sharded
{}
"""
SUMS_GRADIENTS = """
    def sums(model, **settings):
        engine = shard(model, **settings)
        for unit in engine.units:
            for flat in unit.flats:
                flat.gradients.divide_by(1.0)
        return engine
    correctness.shard = sums
"""
KILLS_A_RANK = """
    def kills(sharded, recipe, context):
        if recipe.optimizer == "SGD" and context.ranks.rank == 1:
            os._exit(7)
        return compare(sharded, recipe, context)
    correctness.train_sharded = kills
"""
RAISES = """
    def raises(sharded, recipe, context):
        if recipe.optimizer == "SGD" and context.ranks.rank == 1:
            open("/secret/place")
        return compare(sharded, recipe, context)
    correctness.train_sharded = raises
"""
HANGS = """
    import time
    correctness.train_sharded = lambda *arguments: time.sleep(600)
"""


def selftest(*arguments: object, folder: Path, spoiled: str = "", expected: int = 0) -> str:
    """What the command prints on two CPU ranks; `spoiled` is a body of :data:`SPOILED`."""
    (folder / "sitecustomize.py").write_text(SPOILED.format(spoiled) if spoiled else "")
    words = ("-m", "torch_shard", "selftest", "--device", "cpu", "--ranks", 2, "--quick")
    return run_python(*words, *arguments, path=[folder], expected=expected, timeout=550).stdout


def check_it_names_nobody(report: Path) -> None:
    for file in (report, report.with_suffix(".json")):
        text = file.read_text()
        for name in (socket.gethostname(), str(report.parent), str(Path(__file__).parents[2]), "/tmp", "/usr", "/home"):
            assert name not in text, name
        if getpass.getuser() != "root":
            assert getpass.getuser() not in text


@pytest.mark.exhaustive  # half a minute; the parts of the command have tests of their own
@pytest.mark.wheel
def test_what_is_good_passes_and_two_files_say_so(tmp_path):
    report = tmp_path / "report.html"
    said = selftest("--only", "memory,streams", "--case", "full_shard*", "--report", report, folder=tmp_path)
    assert re.search(r"^memory +10 passed$", said, re.M) and re.search(r"^streams +2 skipped$", said, re.M), said
    assert "the CPU has no streams" in said and "PASSED: 10 passed, 0 failed, 2 skipped" in said
    found = json.loads(report.with_suffix(".json").read_text())
    assert found["good"] and found["counts"] == {"passed": 10, "failed": 0, "skipped": 2}
    assert len(found["environment"]["devices"]) == 2 and found["environment"]["torch"]
    passed = [r for r in found["results"] if r["status"] == "passed"]
    assert all(r["measured"] == r["expected"] for r in passed if "peak of a step" not in r["name"])
    assert all(r["measured"] <= r["expected"] for r in passed)
    assert not re.search(r"""(src|href)="[^#]|@import|url\([^#]""", report.read_text())
    check_it_names_nobody(report)


@pytest.mark.exhaustive
def test_an_engine_that_sums_gradients_fails_by_the_name_of_the_case(tmp_path):
    said = selftest("--case", "full_shard, fp32, SGD", folder=tmp_path, spoiled=SUMS_GRADIENTS, expected=1)
    assert "first failure  correctness: full_shard, fp32, SGD\n  measured 1" in said, said
    assert "with a tolerance of 0.001\n  Don't train with this combination." in said
    assert "FAILED: 0 passed, 1 failed, 0 skipped" in said


@pytest.mark.exhaustive
def test_a_rank_that_dies_is_named_and_the_next_case_runs_in_new_ranks(tmp_path):
    said = selftest("--case", "full_shard, fp32, *", folder=tmp_path, spoiled=KILLS_A_RANK, expected=1)
    assert "full_shard, fp32, SGD\n  rank 1 ended with exit code 7\n" in said
    assert "FAILED: 1 passed, 1 failed, 0 skipped" in said


@pytest.mark.exhaustive
def test_an_error_of_one_rank_is_quoted_without_its_path(tmp_path):
    report = tmp_path / "report.html"
    words = ("--case", "full_shard, fp32, *", "--report", report)
    said = selftest(*words, folder=tmp_path, spoiled=RAISES, expected=1)
    assert "rank 1: FileNotFoundError: [Errno 2] No such file or directory: <path>" in said
    assert "torch_shard.selftest.correctness:" in said and "FAILED: 1 passed, 1 failed, 0 skipped" in said
    check_it_names_nobody(report)


@pytest.mark.exhaustive
def test_ranks_that_hang_end_with_the_time_of_their_part(tmp_path):
    said = selftest("--case", "full_shard, fp32, *", "--timeout", 20, folder=tmp_path, spoiled=HANGS, expected=1)
    assert "the ranks had not ended it when the 20 s of this part were over" in said
    assert "skipped: not run: the 20 s of this part were over" in said


@pytest.mark.exhaustive
def test_all_parts_pass_on_two_ranks(tmp_path):
    report = tmp_path / "report.html"
    said = selftest("--report", report, folder=tmp_path)
    assert ", 0 failed, " in said and "speed        3 passed" in said and "offload      3 passed" in said
    check_it_names_nobody(report)


def test_an_interrupted_run_has_said_what_the_parts_before_have_found(tmp_path):
    report = tmp_path / "report.html"
    words = ["selftest", "--device", "cpu", "--quick", "--only", "streams,memory", "--report", str(report)]
    command = [sys.executable, "-m", "torch_shard", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        title, _, streams = (process.stdout.readline() for _ in range(3))
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=100)
    assert title.startswith(f"torch-shard-engine {__version__}, torch {torch.__version__}; 2 ranks on cpu")
    assert streams == "streams      6 skipped\n" and "6 skipped" in report.read_text()
    assert process.returncode == 130 and "interrupted" in error


def test_where_everything_is_skipped_nothing_has_passed(capsys):
    assert main(["selftest", "--device", "cpu", "--only", "streams"]) == 2
    assert "NOTHING WAS CHECKED: 0 passed, 0 failed, 6 skipped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--device cuda", "torch sees no GPU here"),
        ("--share-gpus", "--share-gpus: the ranks run on the CPU"),
        ("--ranks 0", "--ranks must be 1 or more, not 0"),
        ("--only memory,spead", "--only: 'spead' is not a part; the parts are correctness,"),
        ("--case full", "--case 'full' is the name of no case"),
        ("--peak-tflops -1", "--peak-tflops must be a positive number"),
        ("--timeout 0", "--timeout must be a positive, finite number"),
        ("--timeout inf", "--timeout must be a positive, finite number"),
        ("--report report.txt", "the name must end in .html"),
        ("--report /gone/report.html", "can't be written there (No such file or directory)"),
        ("--tests", "torch sees no GPU here"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said, capsys, monkeypatch):
    monkeypatch.setattr(devices, "count", lambda: 0)
    monkeypatch.setattr("torch_shard.selftest.gpu_tests.count", lambda: 0)
    monkeypatch.chdir(Path(__file__).parents[2])
    assert main(["selftest", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("torch-shard: ") and err.count("\n") == 1 and said in err


def test_more_ranks_than_gpus_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(devices, "count", lambda: 1)
    assert main(["selftest", "--ranks", "2"]) == 2
    assert "--ranks 2: each rank needs a GPU of its own, and torch sees 1. Use" in capsys.readouterr().err


def test_ranks_that_share_a_gpu_are_not_timed(monkeypatch):
    monkeypatch.setattr(devices, "count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    setting = checked_setting("cuda", 4, True, None, shares=True)
    assert setting.shares and all(case.skip for part in ("speed", "offload") for case in cases_of(part, setting))
    assert not any(case.skip for case in cases_of("memory", setting))
    assert not checked_setting("cuda", 1, True, None, shares=True).shares


def test_a_torch_without_nccl_is_refused_for_gpus(capsys, monkeypatch):
    monkeypatch.setattr(devices, "count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    assert main(["selftest"]) == 2
    assert "no NCCL" in capsys.readouterr().err


def test_the_gpu_tests_need_a_checkout(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["selftest", "--tests"]) == 2
    assert "not in a checkout" in capsys.readouterr().err
