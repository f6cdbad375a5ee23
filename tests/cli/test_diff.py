"""diff: what differs is said, in whatever formats the two are, and equal is equal to the bit."""

from __future__ import annotations

import math

import pytest
import torch

from torch_shard.checkpoint.tools.diff import differing


def test_a_checkpoint_equals_itself_in_any_format(made, tmp_path, cli):
    cli("consolidate", made / "ours", tmp_path / "x.pt")
    assert cli("diff", made / "ours", tmp_path / "x.pt") == "equal (93 entries)\n"
    found = cli("diff", tmp_path / "x.pt", made / "ours", "--json")
    assert found["equal"] is True and found["compared"] == 93 and found["differences"] == []
    # Names of DDP's wrapper, numbers for names, the model at the top: one model, trained once.
    for a in ("ddp", "titan", "app", "plain.pt"):
        for b in ("ddp", "titan", "app"):
            cli("diff", made / a, made / b, "--model-only")
    cli("diff", made / "ddp", made / "app")
    cli("diff", made / "lightning", made / "ours_lightning")
    cli("diff", made / "trainer.ckpt", made / "lightning_fsdp1")


def test_what_differs_is_listed(made, tmp_path, cli):
    cli("consolidate", made / "ours", tmp_path / "x.pt")
    values = torch.load(tmp_path / "x.pt", weights_only=True)
    values["model"]["net.conv.bias"] = values["model"]["net.conv.bias"] + torch.tensor([0.0, 0.5])
    values["model"]["norm.weight"] = values["model"]["norm.weight"].double()
    values["model"]["norm.bias"] = torch.zeros(3)
    del values["model"]["net.frozen"]
    values["model"]["new"] = torch.ones(2, 2)
    values["optimizer"]["param_groups"][1]["lr"] = 0.5
    values["extra"] = {"step": 3}
    torch.save(values, tmp_path / "y.pt")
    found = cli("diff", tmp_path / "x.pt", tmp_path / "y.pt", "--json", expected=1)
    kinds = {own["name"]: own for own in found["differences"]}
    assert {name: own["kind"] for name, own in kinds.items()} == {
        "model.net.conv.bias": "values",
        "model.norm.weight": "dtype",
        "model.norm.bias": "shape",
        "model.net.frozen": "only in A",
        "model.new": "only in B",
        "optimizer.param_groups.1.lr": "object",
        "extra.step": "object",
    }
    own = kinds["model.net.conv.bias"]
    assert (own["elements"], own["total"]) == (1, 2) and math.isclose(own["max_abs"], 0.5, rel_tol=1e-6)
    assert kinds["model.norm.weight"]["elements"] == 0
    assert (kinds["extra.step"]["a"], kinds["extra.step"]["b"]) == (2, 3)
    out = cli("diff", tmp_path / "x.pt", tmp_path / "y.pt", expected=1)
    assert "values: model.net.conv.bias: 1 of 2 elements, at most 0.5 apart" in out
    assert "only in B: model.new [2, 2] float32" in out and out.endswith("7 of 94 entries differ\n")
    # Sharded, where the optimizer's state has names for numbers, the same is found.
    found = cli("diff", made / "ours", tmp_path / "y.pt", "--json", expected=1)
    assert {own["name"] for own in found["differences"]} == set(kinds)


def test_tolerances(made, tmp_path, cli):
    cli("consolidate", made / "ours", tmp_path / "x.pt", "--model-only", "--dtype", "bf16")
    arguments = ("diff", made / "ours", tmp_path / "x.pt", "--model-only", "--rtol", "0.01")
    cli(*arguments, expected=1)
    cli(*arguments, "--ignore-dtype")
    cli("diff", made / "ours", tmp_path / "x.pt", "--model-only", "--ignore-dtype", expected=1)
    cli("diff", made / "ours", tmp_path / "x.pt", "--rtol", "-1", expected=2)


@pytest.mark.parametrize(
    ("x", "y", "exact", "close", "largest"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0, 0, 0.0),
        ([0.0], [-0.0], 1, 0, 0.0),
        ([math.inf, 2.0], [math.inf, 2.5], 1, 1, 0.5),
        ([1.0, 1.0], [1.0001, 1.0], 1, 0, 0.0001),
        ([math.nan], [1.0], 1, 1, math.nan),
        ([], [], 0, 0, 0.0),
    ],
)
def test_elements_that_differ(x, y, exact, close, largest):
    one, two = torch.tensor(x, dtype=torch.float64), torch.tensor(y, dtype=torch.float64)
    count, most = differing(one, two)
    assert count == exact and (math.isclose(most, largest, rel_tol=1e-6) or math.isnan(most) and math.isnan(largest))
    assert differing(one, two, rtol=1e-3)[0] == close


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_elements_of_other_dtypes(dtype):
    one = torch.tensor([0, 1, 1, 0]).to(dtype)
    two = torch.tensor([0, 1, 0, 0]).to(dtype)
    assert differing(one, two) == (1, 1.0) and differing(one, one.clone()) == (0, 0.0)
    assert differing(torch.tensor(1), torch.tensor(3.0)) == (1, 2.0)
