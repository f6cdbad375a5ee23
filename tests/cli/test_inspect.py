"""inspect: what a checkpoint says of itself, of every format what it knows."""

from __future__ import annotations

import re

import pytest
import torch

from tests.checkpoint.helpers import Model, alone, files_of, save
from torch_shard.versions import __version__


def test_everything_that_ours_says(made, cli):
    found = cli("inspect", made / "ours", "--json")
    assert (found["format"], found["format_version"], found["world_size"]) == ("torch-shard", 1, 2)
    assert (found["torch"], found["torch_shard"]) == (torch.__version__, __version__)
    assert found["strategy"] == "full_shard" and found["saved_at"] > 1.7e9 and found["extra"] == ["step"]
    assert set(found["files"]) == set(files_of(made / "ours")) and not found["not_read"]
    rows = {row["name"]: row for row in found["parameters"]}
    state = {name: value for name, value in Model().state_dict().items() if isinstance(value, torch.Tensor)}
    assert list(rows) == list(state)
    for name, value in state.items():
        assert rows[name]["shape"] == list(value.shape) and f"torch.{rows[name]['dtype']}" == str(value.dtype)
        assert rows[name]["bytes"] == value.nbytes and rows[name]["elements"] == value.numel()
    kinds = {name: rows[name]["kind"] for name in ("net.scale", "net.frozen", "mask", "net.head.weight")}
    assert kinds == {"net.scale": "parameter", "net.frozen": "frozen", "mask": "buffer", "net.head.weight": "tied"}
    assert rows["net.head.weight"]["tied_to"] == "net.embed.weight"
    assert rows["net.scale"]["optimizer_state"] == ["step", "exp_avg", "exp_avg_sq"]
    assert rows["net.embed.weight"]["unit"] in {unit["name"] for unit in found["units"]}
    assert found["elements"] == sum(v.numel() for n, v in state.items() if n != "net.head.weight")
    (optimizer,) = found["optimizers"].values()
    assert optimizer["by"] == "name" and [group["settings"]["lr"] for group in optimizer["groups"]] == [0.01, 0.02]
    assert optimizer["state"] == ["exp_avg", "exp_avg_sq", "step"]


def test_the_same_for_people(made, cli):
    out = cli("inspect", made / "ours", "--units", "--files")
    assert "sharded, of torch-shard-engine, version 1" in out and "2, full_shard, 6 units" in out
    assert "group 1: 10 parameters, weight_decay=0.0, lr=0.02" in out
    assert "__1_0.distcp" in out and "net.blocks.1" in out and "= net.embed.weight" in out
    lines = out.splitlines()
    (line,) = [line for line in lines if line.startswith("net.blocks.0.0.weight ")]
    assert " ".join(line.split()) == (
        "net.blocks.0.0.weight 11x5 float32 220 B parameter net.blocks.0 step, exp_avg, exp_avg_sq"
    )


@pytest.mark.parametrize(
    ("kind", "form", "optimizers", "extra"),
    [
        ("fsdp2", "dcp", {"": "name"}, None),
        ("ddp", "dcp", {"": "number"}, None),
        ("titan", "dcp", {"": "name"}, None),
        ("app", "dcp", {"": "name"}, None),
        ("plain.pt", "torch", {"": "number"}, None),
        ("state.pt", "torch", {}, None),
        ("several", "torch-shard", {"one": "name", "two": "name"}, "[1, tensor([1., 1.])]"),
    ],
)
def test_other_formats(kind, form, optimizers, extra, made, cli):
    found = cli("inspect", made / kind, "--json")
    assert found["format"] == form and found["extra"] == extra
    assert {name: own["by"] for name, own in found["optimizers"].items()} == optimizers
    names = {row["name"].removeprefix("module.") for row in found["parameters"]}
    assert "blocks.0.up.weight" in names and "head.weight" in names
    if kind == "several":
        assert "teacher.head.weight" in names
    assert "head.weight" in cli("inspect", made / kind)


@pytest.mark.parametrize("extra", [torch.arange(3), 0, []])
def test_an_extra_that_is_no_dict_is_shown(extra, tmp_path, cli):
    _model, engine = alone()
    save(engine, tmp_path / "c", extra=extra)
    engine.close()
    text = "'tensor [3] int64'" if isinstance(extra, torch.Tensor) else repr(extra)
    assert cli("inspect", tmp_path / "c", "--json")["extra"] == text
    assert re.search(rf"^extra +{re.escape(text)}$", cli("inspect", tmp_path / "c"), re.MULTILINE)


@pytest.mark.parametrize("kind", ["trainer.ckpt", "lightning", "ours_lightning"])
def test_checkpoints_of_lightning(kind, made, cli):
    found = cli("inspect", made / kind, "--json")
    assert found["lightning"].startswith("2.") and {"epoch", "global_step", "hyper_parameters"} <= set(found["extra"])
    assert len(found["optimizers"][""]["groups"]) == 2
    assert f"Lightning   {found['lightning']}" in cli("inspect", made / kind)
