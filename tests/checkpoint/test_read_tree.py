"""A checkpoint of several models read into nested dicts, for front ends that decide themselves what is loaded."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import torch_shard
from tests.checkpoint.test_interop import adamw, double, saved_as
from tests.compat.harness import MLP, batch, plain_backward
from tests.support.ranks import ranks
from torch_shard.checkpoint.sharded.read_tree import read_contents
from torch_shard.errors import StateDictError
from torch_shard.shard_tensor.tensor import ShardTensor


def two(seed: int, rank: int) -> tuple[list[Any], list[torch_shard.Engine], torch.optim.Optimizer]:
    """Two models, which engines don't keep, their engines, and an optimizer over both that has made a step."""
    torch.manual_seed(seed)
    models = [MLP().double(), MLP(width=9).double()]
    engines = [torch_shard.shard(model, unit_bytes=500, timeout=20.0) for model in models]
    optimizer = torch.optim.Adam(itertools.chain(*(model.parameters() for model in models)), lr=0.01)
    for model in models:
        plain_backward(model, batch(rank, 0))
    optimizer.step()
    return models, engines, optimizer


@ranks(2, exhaustive=(1, 3))
def test_models_are_read_by_name_and_optimizer_state_after_them(rank, tmp_path):
    _models, (first, other), optimizer = two(0, rank)
    first.save(tmp_path / "c", optimizer, models={"other": other})
    _others, (again, second), live = two(1, rank)
    found = read_contents(again, tmp_path / "c", [live], models={"mine": again, "other": second})
    assert [source.path for source in found.sources] == [("model",), ("models", "other")]
    for state, engine in ((found.model, first), (found.models["other"], other)):
        wanted: dict[str, Any] = engine.state_dict(form="sharded")
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name].to_local(), value.to_local()) for name, value in wanted.items())
    (saved,) = found.optimizers
    names = [
        *(n for n, _ in first.model.named_parameters()),
        *(f"other.{n}" for n, _ in other.model.named_parameters()),
    ]
    assert saved["param_groups"][0]["params"] == names
    held = optimizer.param_groups[0]["params"]
    for name, p in zip(names, held, strict=True):
        moment = saved["state"][name]["exp_avg"]
        assert isinstance(moment, ShardTensor)
        assert torch.equal(moment.to_local(), optimizer.state[p]["exp_avg"].to_local())


@ranks(2)
def test_one_of_several_is_read_alone_and_two_unknown_ones_are_an_error(rank, tmp_path):
    _models, (first, other), _ = two(0, rank)
    first.save(tmp_path / "c", models={"other": other})
    _others, (_, second), _ = two(1, rank)
    found = read_contents(second, tmp_path / "c", models={"other": second})
    assert found.model == {} and list(found.models) == ["other"]
    wanted = other.state_dict(form="sharded")
    assert all(torch.equal(found.models["other"][n].to_local(), v.to_local()) for n, v in wanted.items())
    with pytest.raises(StateDictError, match="no models of the names 'a', 'b'"):
        read_contents(first, tmp_path / "c", models={"a": first, "b": second})


@ranks(2)
def test_an_optimizer_within_an_applications_state_is_found(rank, tmp_path):
    model, optimizer = saved_as("app", rank, tmp_path / "c")
    live = double()
    engine = torch_shard.shard(live)
    (saved,) = read_contents(engine, tmp_path / "c", [adamw(live)]).optimizers
    for (name, _), p in zip(live.named_parameters(), model.parameters(), strict=True):
        moment = saved["state"][name]["exp_avg"]
        assert torch.equal(moment.full_tensor(), optimizer.state[p]["exp_avg"]), name
