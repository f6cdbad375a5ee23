"""The programs in `examples` run as their help says, resume on another number of ranks, and stay short."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.support.run_python import run_python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def raw_torch(ranks: int, *arguments: object, folder: Path, program: str = "raw_torch.py") -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
    return run_python(*launcher, EXAMPLES / program, *arguments, folder=folder, timeout=560).stdout


def held_out_loss(printed: str) -> str:
    found = re.search(r"held-out loss (\d+\.\d+) nats per byte, byte bigram \d+\.\d+", printed)
    assert found is not None, printed
    return found[1]


@pytest.mark.parametrize(("program", "most"), [("raw_torch.py", 80), ("muon.py", 100)])
def test_the_plain_examples_are_short(program, most):
    assert len((EXAMPLES / program).read_text().splitlines()) < most


@pytest.mark.exhaustive
def test_the_example_for_torchs_fsdp_prints_the_same_with_both_packages(tmp_path):
    arguments = ("--steps", 3, "--package")
    ours = raw_torch(
        2, *arguments, "torch_shard.fsdp", "--save", tmp_path / "gpt.pt", folder=tmp_path, program="fsdp.py"
    )
    assert ours == raw_torch(2, *arguments, "torch.distributed.fsdp", folder=tmp_path, program="fsdp.py")
    saved = torch.load(tmp_path / "gpt.pt", weights_only=True)
    assert all(type(value) is torch.Tensor and "_fsdp" not in name for name, value in saved.items())


@pytest.mark.exhaustive
def test_the_plain_example_saves_on_two_ranks_and_resumes_on_one(tmp_path):
    file = tmp_path / "gpt.pt"
    first = raw_torch(2, "--steps", 3, "--save", file, folder=tmp_path)
    assert "total (" in first and "full_shard over 2 ranks" in first  # the plan
    saved = torch.load(file, weights_only=True)
    assert saved["schedule"]["last_epoch"] == 3
    assert all(type(value) is torch.Tensor for value in saved["model"].values())
    assert {entry["step"].item() for entry in saved["optimizer"]["state"].values()} == {3}

    whole = sum(value.numel() * value.element_size() for value in saved["model"].values()) / 2**20
    rows = re.findall(r"^rank (\d), MiB held/under DDP: (.*)$", first, flags=re.M)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for _, figures in rows:
        held = {kind: (float(mine), float(ddp)) for kind, mine, ddp in re.findall(r"(\w+) ([\d.]+)/([\d.]+)", figures)}
        assert list(held) == ["parameters", "gradients", "optimizer"]
        assert [ddp for _, ddp in held.values()] == pytest.approx([whole, whole, 2 * whole], abs=0.01)
        assert all(mine == pytest.approx(ddp / 2, rel=0.02) for mine, ddp in held.values())

    # No further step: the model is the one that was saved, by its loss and by the text that it writes.
    same = raw_torch(1, "--steps", 3, "--resume", file, folder=tmp_path)
    assert same[same.index("held-out loss") :] == first[first.index("held-out loss") :]

    more = raw_torch(1, "--steps", 4, "--resume", file, "--save", tmp_path / "next.pt", folder=tmp_path)
    resumed = torch.load(tmp_path / "next.pt", weights_only=True)
    assert resumed["schedule"]["last_epoch"] == 4
    # One step after three: the optimizer's state has gone on, not begun anew.
    assert {entry["step"].item() for entry in resumed["optimizer"]["state"].values()} == {4}
    assert float(held_out_loss(more)) < float(held_out_loss(first)) < 5.6  # ln 256 is 5.545


@pytest.mark.exhaustive
def test_the_muon_example_saves_on_two_ranks_and_resumes_on_one(tmp_path):
    file = tmp_path / "muon.pt"
    first = raw_torch(2, "--steps", 30, "--save", file, folder=tmp_path, program="muon.py")
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\d\.\d+)", first, flags=re.M)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    owned = re.findall(r"^rank (\d) owns (\d+) of 16 matrices, ([\d.]+) MiB", first, flags=re.M)
    assert [rank for rank, _, _ in owned] == ["0", "1"] and sum(int(count) for _, count, _ in owned) == 16
    assert float(owned[0][2]) == pytest.approx(float(owned[1][2]), rel=0.1)
    saved = torch.load(file, weights_only=True)
    assert len(saved["muon"]["state"]) == 16
    assert {entry["step"].item() for entry in saved["adamw"]["state"].values()} == {30}

    # No further step: the model is the one that was saved.
    same = raw_torch(1, "--steps", 30, "--resume", file, folder=tmp_path, program="muon.py")
    assert same[same.index("held-out loss") :] == first[first.index("held-out loss") :]
    more = raw_torch(3, "--steps", 40, "--resume", file, folder=tmp_path, program="muon.py")
    assert "step 40: loss" in more and "step 30" not in more


ACCELERATE = EXAMPLES / "accelerate_lm.py"
IMPORT = "from accelerate_shard import Accelerator"


def stock_accelerate_lm() -> str:
    """The same script for stock Accelerate."""
    ours = ACCELERATE.read_text().splitlines()
    (line,) = [number for number, text in enumerate(ours) if text.startswith(IMPORT)]
    ours[line] = "from accelerate import Accelerator"
    return "\n".join(ours)


def accelerate_launch(program: Path, *arguments: object, folder: Path) -> str:
    """On two CPU ranks, as the script's own help says."""
    executable = Path(sys.executable).with_name("accelerate")
    options = ("--multi_gpu", "--num_processes", 2, "--num_machines", 1, "--main_process_port", 0)
    environment = {"ACCELERATE_USE_CPU": "true"}
    printed = run_python(executable, "launch", *options, program, *arguments, folder=folder, timeout=280, **environment)
    return re.sub(r", [\d,]+ tokens/s", "", printed.stdout)


def test_the_accelerate_example_is_a_stock_script_but_for_its_import():
    stock = stock_accelerate_lm()
    assert IMPORT in ACCELERATE.read_text()
    imported = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(stock))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert "accelerate" in imported and not imported & {"accelerate_shard", "torch_shard"}
    assert "engine" not in stock


@pytest.mark.exhaustive
def test_the_accelerate_example_prints_what_stock_accelerate_prints(tmp_path):
    pytest.importorskip("accelerate")
    stock = tmp_path / "stock.py"
    stock.write_text(stock_accelerate_lm())
    for module in ("gpt.py", "stdlib_text.py"):
        (tmp_path / module).symlink_to(EXAMPLES / module)
    ours, theirs = (
        accelerate_launch(program, "--steps", 6, "--accumulate", 2, folder=tmp_path) for program in (ACCELERATE, stock)
    )
    assert ours == theirs and float(held_out_loss(ours)) < 5.6
    assert re.search(r"^step 6: loss \d\.\d+ nats per byte, norm \d+\.\d+$", ours, flags=re.M), ours


@pytest.mark.exhaustive
def test_the_accelerate_example_runs_under_torchrun_saves_and_resumes(tmp_path):
    pytest.importorskip("accelerate")
    run = {"folder": tmp_path, "program": "accelerate_lm.py"}
    whole = raw_torch(2, "--steps", 4, "--save", tmp_path / "whole", **run)
    same = raw_torch(2, "--steps", 4, "--resume", tmp_path / "whole", **run)
    assert same[same.index("held-out loss") :] == whole[whole.index("held-out loss") :]
    assert list((tmp_path / "whole" / "model").glob("*.safetensors"))


@pytest.mark.exhaustive
def test_the_lightning_example_trains_reports_and_resumes_on_another_number_of_ranks(tmp_path):
    pytest.importorskip("lightning")
    # So few steps do not beat a table of byte pairs, and the example's exit code says so.
    program = EXAMPLES / "lightning_gpt.py"
    printed = run_python(program, "--steps", 20, folder=tmp_path, expected=1, timeout=280).stdout
    train, resume = printed.split("== resume: ")
    assert "== train: 2 rank(s), cpu, strategy 'shard'" in train
    assert "full_shard over 2 ranks" in train
    assert re.search(r"step 18: loss \d\.\d+ nats per byte, [\d,]+ tokens/s", train), train
    rows = {
        name: [float(number) for number in numbers.split()]
        for name, numbers in re.findall(r"^(rank \d|DDP, every rank) +([\d. ]+)$", train, flags=re.M)
    }
    assert list(rows) == ["rank 0", "rank 1", "DDP, every rank"]
    for rank in (0, 1):
        assert rows[f"rank {rank}"] == pytest.approx([n / 2 for n in rows["DDP, every rank"]], rel=0.02)
    assert "saved step 18 from 2 rank(s)" in train

    assert resume.startswith("1 rank(s), cpu, strategy 'shard'")
    assert re.search(r"step 20: loss \d\.\d+ nats per byte", resume), resume
    assert "sample:\ndef main(" in resume
    assert re.search(
        r"held-out loss \d\.\d+ nats per byte, byte bigram \d\.\d+: -?\d\.\d+ better; LESS THAN 0.3", resume
    )


def test_the_fabric_example_is_under_80_lines():
    assert len((EXAMPLES / "fabric_gpt.py").read_text().splitlines()) < 80


def fabric_gpt(*arguments: object, folder: Path) -> str:
    printed = run_python(EXAMPLES / "fabric_gpt.py", *arguments, folder=folder, timeout=280).stdout
    return re.sub(r", [\d,]+ tokens/s", "", printed)[printed.index("step ") :]


@pytest.mark.exhaustive
def test_the_fabric_example_prints_what_ddp_prints_and_resumes_on_one_rank(tmp_path):
    pytest.importorskip("lightning")
    arguments = ("--accumulate", 2, "--steps", 3, "--save")
    ours = fabric_gpt(*arguments, tmp_path / "shard.ckpt", folder=tmp_path)
    assert ours == fabric_gpt(*arguments, tmp_path / "ddp.ckpt", "--strategy", "ddp", folder=tmp_path)
    assert "step 3: loss" in ours
    resumed = ("--steps", 4, "--devices", 1, "--resume")
    more = fabric_gpt(*resumed, tmp_path / "shard.ckpt", folder=tmp_path)
    assert float(held_out_loss(more)) < float(held_out_loss(ours)) < 5.6
    assert held_out_loss(more) == held_out_loss(fabric_gpt(*resumed, tmp_path / "ddp.ckpt", folder=tmp_path))
