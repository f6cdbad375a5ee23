"""An unmodified script under ``accelerate launch``, as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest

from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.launching import FSDP1, FSDP2, SCRIPT, accelerate_launch, write_yaml
from tests.support.ranks import run
from tests.support.run_python import run_python
from torch_shard import Offload

RUNNER = ("-m", "accelerate_shard")

TRAINER = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (4, 16))]
args = TrainingArguments("out", per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True)
trainer = Trainer(model=GPT2LMHeadModel(config), args=args, train_dataset=data)
trainer.train()
trainer.save_model()
print('RESULT {"class": "%s"}\\n' % type(trainer.accelerator).__module__, end="", flush=True)
trainer.accelerator.end_training()  # without it Gloo's threads may abort the process at its end, under DDP too
"""


def script(folder: Path, text: str = SCRIPT, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def result(output: str) -> dict[str, Any]:
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return found


def _stock(rank: int, world_size: int, path: Path) -> str:
    output = io.StringIO()
    with clean_state(), contextlib.redirect_stdout(output), unittest.mock.patch.object(sys, "argv", [str(path)]):
        os.environ.update(ACCELERATE_USE_CPU="true", KEEP_GROUP="true")
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()


def stock(folder: Path) -> dict[str, Any]:
    """The same script with Accelerate's own Accelerator and DistributedDataParallel."""
    found = result(run(2, _stock, folder / "train.py")[0])
    assert found["class"] == "accelerate.accelerator" and found["ranks"] == 2
    return found


def check_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["class"] == "accelerate_shard.accelerator" and found["ranks"] == 2 and found["type"] == "MULTI_CPU"
    assert found["plugins"] == [False, False]  # scripts that ask find the answers of DDP
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-5, abs=0)
    assert found["norms"] == pytest.approx(wanted["norms"], rel=1e-5, abs=0)


@pytest.mark.exhaustive
def test_an_fsdp_yaml_shards_an_unmodified_script_with_the_numbers_of_ddp(tmp_path: Path) -> None:
    script(tmp_path)
    wanted = stock(tmp_path)
    fsdp = {
        **FSDP2,
        "fsdp_reshard_after_forward": False,
        "fsdp_transformer_layer_cls_to_wrap": "Layer",
        "shard_prefetch": 2,
    }
    path = write_yaml(tmp_path, fsdp)
    done = accelerate_launch("--config_file", path, *RUNNER, "train.py", "--lr", "0.1", folder=tmp_path)
    found = result(done.stdout)
    check_same(found, wanted)
    assert found["argv"] == ["train.py", "--lr", "0.1"] and Path(found["path"]).samefile(tmp_path)
    assert found["settings"] == {
        "strategy": "shard_grad_op", "prefetch": 2, "layer_classes": ["Layer"], "state_dict_type": "sharded",
        "offload": "None",
    }  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fsdp", "strategy", "offload"),
    [
        ({**FSDP1, "fsdp_offload_params": True, "fsdp_activation_checkpointing": True}, "full_shard", Offload()),
        ({**FSDP1, "fsdp_reshard_after_forward": "HYBRID_SHARD"}, "hybrid_shard", None),
        ({**FSDP2, "shard_offload": {"nvme": "disk"}}, "full_shard", Offload(nvme="disk")),
    ],
    ids=["FSDP 1", "hybrid", "FSDP 2"],
)
def test_other_yamls_train_as_ddp_and_leave_no_files_on_disk(
    fsdp: dict[str, Any], strategy: str, offload: Any, tmp_path: Path
) -> None:
    script(tmp_path)
    path = write_yaml(tmp_path, fsdp)
    found = result(accelerate_launch("--config_file", path, *RUNNER, "train.py", folder=tmp_path).stdout)
    check_same(found, stock(tmp_path))
    assert (found["settings"]["strategy"], found["settings"]["offload"]) == (strategy, repr(offload))
    assert not any((tmp_path / "disk").glob("*"))


@pytest.mark.exhaustive
def test_the_import_line_is_enough_under_an_fsdp_yaml(tmp_path: Path) -> None:
    script(tmp_path)
    wanted = stock(tmp_path)
    script(tmp_path, SCRIPT.replace("from accelerate import", "from accelerate_shard import"), "ours.py")
    path = write_yaml(tmp_path, {**FSDP2, "shard_strategy": "shard_optim"}, use_cpu=True)
    found = result(accelerate_launch("--config_file", path, "ours.py", folder=tmp_path).stdout)
    check_same(found, wanted)
    assert found["settings"]["strategy"] == "shard_optim"


@pytest.mark.exhaustive
def test_a_module_and_a_yaml_without_fsdp_run_too(tmp_path: Path) -> None:
    script(tmp_path)
    wanted = stock(tmp_path)
    package = tmp_path / "training"
    package.mkdir()
    (package / "__init__.py").touch()
    script(package, name="start.py")
    path = write_yaml(tmp_path, {}, distributed_type="MULTI_GPU")
    done = accelerate_launch(
        "--config_file", path, *RUNNER, "-m", "training.start", "--x", folder=tmp_path, SHARD_STRATEGY="shard_optim"
    )
    found = result(done.stdout)
    check_same(found, wanted)
    assert found["settings"]["strategy"] == "shard_optim" and found["argv"][1:] == ["--x"]
    assert Path(found["argv"][0]).samefile(package / "start.py")


@pytest.mark.exhaustive
def test_an_unmodified_script_with_a_trainer_is_sharded(tmp_path: Path) -> None:
    script(tmp_path, TRAINER)
    path = write_yaml(tmp_path, {**FSDP2, "fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}, use_cpu=True)
    report = ("--report", "run.html")
    done = accelerate_launch("--config_file", path, *RUNNER, *report, "train.py", folder=tmp_path)
    assert "<h1>GPT2LMHeadModel, rank 0 of 2</h1>" in (tmp_path / "run.html").read_text()
    assert done.stdout.count('RESULT {"class": "accelerate_shard.accelerator"}') == 2, done.stdout
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.exhaustive
def test_what_the_script_raises_is_reported_as_python_does(tmp_path: Path) -> None:
    script(tmp_path)
    done = run_python(*RUNNER, "train.py", "--fail", folder=tmp_path, expected=1)
    said = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert "train.py" in said[1] and said[-1] == "ValueError: something in the script"
    assert "runpy" not in done.stderr and "accelerate_shard" not in done.stderr


@pytest.mark.exhaustive
def test_the_runner_refuses_other_engines_before_the_script_runs(tmp_path: Path) -> None:
    script(tmp_path)
    done = accelerate_launch(*RUNNER, "train.py", folder=tmp_path, expected=None, ACCELERATE_USE_DEEPSPEED="true")
    assert "ACCELERATE_USE_DEEPSPEED" in done.stderr and "accelerate-shard config" in done.stderr
    assert "RESULT" not in done.stdout and "Traceback" not in done.stderr.split("accelerate_shard:")[0]


LATE = """
import time

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = accelerator.prepare(torch.nn.Linear(8, 3))
together = accelerator.get_state_dict(model)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    time.sleep(2)
    alone = accelerator.get_state_dict(model)
    assert all(torch.equal(alone[name], value) for name, value in together.items())
    print('RESULT {"read": %d}' % len(alone), flush=True)
accelerator.end_training()
"""


@pytest.mark.exhaustive
def test_the_main_process_gets_its_model_after_the_others_have_ended_the_training(tmp_path: Path) -> None:
    script(tmp_path, LATE)
    path = write_yaml(tmp_path, FSDP2, use_cpu=True)
    done = accelerate_launch("--config_file", path, *RUNNER, "train.py", folder=tmp_path)
    assert result(done.stdout) == {"read": 2}
