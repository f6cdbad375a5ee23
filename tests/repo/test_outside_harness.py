"""What compares other people's programs (`make outside`) sees differences, and the programs stay out of `make test`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.outside.support.comparison import compare_files, compare_losses
from tests.outside.support.program import Tolerance
from tests.support.run_python import run_python

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, weight: float = 1.0, loss: float = 0.5, date: str = "2026-11-26_18-23-59") -> None:
    """Write what a program might leave."""
    (folder / date).mkdir(parents=True)
    save_file({"weight": torch.full((3,), weight), "key.bias": torch.zeros(2)}, folder / date / "model.safetensors")
    torch.save({"step": torch.tensor(3), "state": [torch.ones(2) * weight]}, folder / "optimizer.pt")
    (folder / "log.json").write_text(json.dumps({"loss": loss, "train_runtime": hash(folder) % 100, "at": date}))
    (folder / "card.md").write_text(f"trained on {date} to {loss}\n")


ROUNDING = Tolerance()


def differences(
    tmp_path: Path, tolerance: Tolerance = ROUNDING, left_out: tuple[str, ...] = (), **changed: object
) -> str:
    write(tmp_path / "one")
    write(tmp_path / "other", date="2027-01-01_00-00-00", **changed)  # type: ignore[arg-type]
    return compare_files(tmp_path / "one", tmp_path / "other", tolerance, left_out).text()


def test_equal_files_are_equal_whatever_the_time(tmp_path):
    assert not differences(tmp_path)


@pytest.mark.parametrize(
    ("changed", "files"),
    [({"weight": 1.001}, ["model.safetensors", "optimizer.pt"]), ({"loss": 0.6}, ["log.json", "card.md"])],
)
def test_other_numbers_are_named(changed, files, tmp_path):
    found = differences(tmp_path, **changed)
    assert all(name in found for name in files) and len(found.splitlines()) == len(files)


def test_only_what_is_named_may_differ(tmp_path):
    assert not differences(tmp_path / "a", left_out=("*.safetensors", "optimizer.pt"), weight=2.0)
    assert "optimizer.pt" in differences(tmp_path / "b", Tolerance(noise={"*: weight": 1.5}), weight=2.0)


def test_missing_files_shapes_and_dtypes_are_differences(tmp_path):
    for name, value in (("one", torch.ones(2)), ("other", torch.ones(3)), ("third", torch.ones(2).double())):
        (tmp_path / name).mkdir()
        torch.save(value, tmp_path / name / "x.pt")
    (tmp_path / "one" / "more.txt").write_text("more")
    found = compare_files(tmp_path / "one", tmp_path / "other", Tolerance(), ()).text()
    assert "more.txt: only under DDP" in found and "shape (2,) under DDP, (3,) here" in found
    assert "dtype" in compare_files(tmp_path / "one", tmp_path / "third", Tolerance(), ()).text()


def test_losses_of_each_rank_are_compared():
    expected = {"0": [1.0, 2.0], "1": [3.0, float("nan")]}
    assert compare_losses(expected, {"0": [1.0, 2.000001], "1": [3.0, float("nan")]}, Tolerance()).differences == []
    assert compare_losses(expected, {"0": [1.0, 2.0], "1": [3.1, float("nan")]}, Tolerance()).differences
    assert compare_losses(expected, {"0": [1.0, 2.0], "1": [3.0]}, Tolerance()).differences
    assert compare_losses(expected, {"0": [1.0, 2.0]}, Tolerance()).differences
    assert compare_losses({"0": [float("inf")]}, {"0": [1.0]}, Tolerance()).differences


def test_programs_are_not_run_by_default():
    settings = (ROOT / "pyproject.toml").read_text()
    assert re.search(r"^addopts = .*not outside", settings, flags=re.M)
    assert not re.search(r"-m ''", (ROOT / "Makefile").read_text())


PROGRAMS = """
import pytest
from . import conftest
from .support.program import TORCHRUN, Program
from .support.sources import NotThere, Own

def check(outcome, folder):
    if outcome.program.name == "missing":
        raise NotThere("no source")
    outcome.result = "refused" if outcome.program.name == "3" else "equal"

conftest.check = check

@pytest.mark.parametrize("number", ["missing", *range(COUNT)])
def test_a_program(number, outside):
    outside.check(Program(str(number), Own("x.py", "torch") if number == 1 else None, (), TORCHRUN))
"""


@pytest.mark.exhaustive
def test_a_session_says_how_many_programs_ran_and_fails_if_all_were_started_and_too_few_ran(tmp_path):
    copied = tmp_path / "tests" / "outside"
    shutil.copytree(ROOT / "tests" / "outside" / "support", copied / "support")
    shutil.copy(ROOT / "tests" / "outside" / "conftest.py", copied)
    for folder in (copied, copied.parent):
        (folder / "__init__.py").touch()
    for count, arguments, expected, said in (
        (16, (), 0, "15 outside programs ran: 14 equal, 1 refused, 1 skipped"),  # and one of this project's own
        (15, (), 1, "14 outside programs ran: 13 equal, 1 refused, 1 skipped"),
        (15, ("-k", "not missing"), 0, "14 outside programs ran: 13 equal, 1 refused, 0 skipped"),
    ):
        (copied / "test_programs.py").write_text(PROGRAMS.replace("COUNT", str(count)))
        pytest_of_them = ("-m", "pytest", "-p", "no:cacheprovider", "tests/outside", *arguments)
        done = run_python(*pytest_of_them, folder=tmp_path, path=[tmp_path], expected=expected)
        assert said in done.stdout and ("this session fails" in done.stdout) == bool(expected), done.stdout
