"""``torch-shard plan script.py``: scripts of all kinds, up to the end of their first step."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from torch_shard.cli.main import main

MODEL = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def net(width=256):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6)]
    return nn.Sequential(nn.Linear(64, width), nn.Sequential(*layers), nn.Linear(width, 10))

def loader(batch=32, rows=256):
    return DataLoader(TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,))), batch_size=batch, num_workers=2)
"""

DDP = """
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("nccl")
data = loader()
model = net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
model = DDP(model)
for step, (x, y) in enumerate(data):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    print("loss", loss.item())
    if step:
        open("second_step", "w")
"""

SHARD = """
import torch_shard

dist.init_process_group()
model = net()
engine = torch_shard.shard(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
for x, y in loader():
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, {"rows": len(x)})
    assert everyone == [{"rows": 32}] * 4
    nn.functional.cross_entropy(model(x), y).backward()
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    engine.save("checkpoint")
"""

MESH = SHARD.replace(
    "dist.init_process_group()",
    'mesh = dist.device_mesh.init_device_mesh("cuda", (4,))\nassert dist.get_world_size() == 4',
).replace("shard(model)", "shard(model, mesh=mesh)")

ACCUMULATES = """
import torch_shard

dist.init_process_group()
model = net()
torch_shard.shard(model)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step, (x, y) in enumerate(loader(4096, 40960), start=1):
    nn.functional.cross_entropy(model(x), y).backward()
    if step % int(sys.argv[1]) == 0:
        optimizer.step()
        optimizer.zero_grad()
"""

LIGHTNING = """
import lightning

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, index):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)

trainer = lightning.Trainer(
    accelerator="gpu", devices=8, strategy="ddp", gradient_clip_val=1.0, log_every_n_steps=1, default_root_dir="logs"
)
trainer.fit(Module(), loader(), loader())
"""

FABRIC = """
import lightning

fabric = lightning.Fabric(accelerator="cuda", devices=8, strategy="fsdp")
fabric.launch()
model = net()
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-3))
for x, y in fabric.setup_dataloaders(loader()):
    fabric.backward(nn.functional.cross_entropy(model(x), y))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
"""

ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator()
model = net()
model, optimizer, data = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-3), loader())
for x, y in data:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

TRANSFORMERS = """
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=500)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 500, (64, 32))]
given = TrainingArguments("out", bf16=True, max_steps=5, report_to=[], logging_steps=1, gradient_accumulation_steps=2)
Trainer(model=model, args=given, train_dataset=rows).train()
"""


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(MODEL + text)
    return str(path)


def planned(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--json", "--gpus", "4", "--device", "cpu", "--memory", "8GiB", *arguments]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--gpus", "4", *arguments]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    return captured.err


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def by_settings(candidates: Any) -> dict[str, int]:
    return {each["settings"]: each["nbytes"] for each in candidates}


def expected() -> dict[str, int]:
    """Return the bytes of the candidates for the same step as a function."""
    layers = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(64, 256), nn.Sequential(*layers), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = torch.randn(32, 64), torch.randint(10, (32,))

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    found = torch_shard.plan.search(model, step, memory=8 << 30, ranks=4, optimizers=[optimizer], on="cpu")
    return {str(each.candidate): each.nbytes for each in found.estimates}


def test_the_first_step_of_a_ddp_script_is_planned_as_the_same_step_in_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = planned(capfd, script(tmp_path, DDP))
    assert by_settings(found["candidates"]) == pytest.approx(expected(), abs=1 << 10)
    assert not Path("second_step").exists()


@pytest.mark.parametrize(
    "text",
    [
        SHARD,
        pytest.param(MESH, marks=pytest.mark.exhaustive),
        pytest.param(LIGHTNING, marks=pytest.mark.exhaustive),
        pytest.param(FABRIC, marks=pytest.mark.exhaustive),
        pytest.param(ACCELERATE, marks=pytest.mark.exhaustive),
    ],
    ids=["shard", "mesh", "Lightning", "Fabric", "Accelerate"],
)
def test_scripts_of_every_kind_are_planned(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str) -> None:
    found = by_settings(planned(capfd, script(tmp_path, text))["candidates"])
    # Gradients are cleared before the forward or after it, and metrics are kept.
    for settings, nbytes in expected().items():
        assert 0.7 * nbytes < found[settings] < 1.05 * nbytes, settings
    assert not Path("checkpoint").exists()


@pytest.mark.exhaustive
def test_the_trainer_of_transformers_is_planned_with_its_precision(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = script(tmp_path, TRANSFORMERS)
    assert main(["plan", "--json", "--gpus", "2", "--nodes", "2", path]) == 0
    found = {each["settings"]: each["kinds"] for each in json.loads(capfd.readouterr().out)["candidates"]}
    assert "hybrid_shard of 2, prefetch 1" in found
    # The peak of no_shard is at the end of backward, with all parameters, Adam's state and gradients in fp32.
    kinds = found["no_shard"]
    assert kinds["optimizer state"] == pytest.approx(2 * kinds["parameter"], rel=0.01)


@pytest.mark.exhaustive
def test_a_dataset_takes_no_memory_of_the_device(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = DDP.replace("data = loader()\n", "").replace("for step", "data = loader()\nfor step")
    large = text.replace("loader()", "loader(rows=1 << 20)")  # 256 MiB
    found = []
    for each in (text, large):
        assert main(["plan", "--json", "--gpus", "4", script(tmp_path, each)]) == 0
        found.append(by_settings(json.loads(capfd.readouterr().out)["candidates"]))
    assert found[0] == found[1]


@pytest.mark.exhaustive
def test_batches_that_the_script_has_dropped_take_no_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, ACCUMULATES)
    two, eight = (by_settings(planned(capfd, path, "--", steps)["candidates"]) for steps in ("2", "8"))
    assert two == eight


@pytest.mark.exhaustive
def test_what_follows_two_dashes_is_the_scripts_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = DDP.replace("model = net()", "print(sys.argv[1:])\nmodel = net(int(sys.argv[2]))")
    path = script(tmp_path, text)
    assert main(["plan", path, "--gpus", "4", "--memory", "2GiB", "--", "--width", "128"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("budget ") and "['--width', '128']" in captured.err
    clips, reads = (f"{path}:{line} in <module>" for line in lines_with(path, "clip_grad_norm_", "loss.item()"))
    assert f"Values that the step reads were assumed to be 0, at {clips}; 1, at {reads}.\n" in captured.out


def lines_with(path: str, *texts: str) -> list[int]:
    """Return the numbers of the lines of a file that contain these texts."""
    lines = Path(path).read_text().splitlines()
    return [next(number for number, line in enumerate(lines, start=1) if text in line) for text in texts]


def test_a_module_is_planned_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path, SHARD.replace("model = net()", "assert __name__ == '__main__'\nmodel = net(int(sys.argv[1]))"))
    monkeypatch.syspath_prepend(tmp_path)
    found = planned(capfd, "-m", "train", "--", "256")
    assert found["script"] == "train"
    assert found["states"] == pytest.approx(1.58 * 2**20, rel=0.01)


def test_if_nothing_fits_layers_are_made_to_recompute(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = script(tmp_path, DDP.replace("loader()", "loader(4096, 4096)"))
    assert main(["plan", path, "--gpus", "2", "--device", "cpu", "--memory", "3MiB"]) == 1
    printed = capfd.readouterr().out
    assert "full_shard, prefetch 0, activation checkpointing" in printed
    assert "full_shard, prefetch 0  (lacks" in printed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net()", r"train\.py has ended and sharded no model"),
        (
            "torch.cuda.get_device_properties(0)",
            r"train\.py fails before it shards a model, at \S*train\.py:\d+ in <module>: ",
        ),
        (
            DDP.replace("model(x), y", "model(x)[model(x)[:, 0].nonzero()[:, 0]], y"),
            r"nonzero\S* at \S*train\.py:\d+ in <module> has .*state alone are 1\.58 MiB on each rank under full_shard",
        ),
        (DDP.replace("    optimizer.step()", ""), r"ended before all optimizers of the model have stepped"),
        (DDP.replace("for step", "other = DDP(net())\nfor step"), r"shards a second model that trains, a Sequential"),
        (SHARD.replace("    optimizer.step()", "    engine.save('early')"), r"engine\.save\(\) can't be used"),
    ],
    ids=["nothing sharded", "needs a GPU", "depends on values", "no step", "two models", "saves before"],
)
def test_what_cannot_be_planned_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert re.search(message, refused(capfd, script(tmp_path, text)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no script 'missing.py'"),
        ([], "give a script or --model"),
        (["--model", "x", "--batch", "1"], "--seq belongs to --model: it is missing"),
        (["train.py", "--batch", "1"], "--batch belongs to --model: a script sets it itself"),
        (["train.py", "--precision", "bf16"], "--precision belongs to --model: a script sets it itself"),
        (["train.py", "--optimizer", "sgd"], "--optimizer belongs to --model: a script sets it itself"),
    ],
)
def test_wrong_arguments_are_named(capfd: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    Path("train.py").write_text("")
    assert message in refused(capfd, *arguments)
