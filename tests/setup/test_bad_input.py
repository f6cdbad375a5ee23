"""Wrong input is an error that names the parameter or argument, on every rank, and the process group lives on.

What only shows once the ranks run is in test_ranks_that_differ.py. The rank pool checks after every test that the
default process group still works.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.bad_input_helpers import Net, all_ranks_agree_on, hasty, small, step
from tests.support.ranks import ranks
from torch_shard.config.shard_config import ShardConfig
from torch_shard.errors import ConfigError, ReplacedParameterError, SetupError, ShardError, ShardPicklingError

# -- configuration ------------------------------------------------------------------------------------------------------


# All of them, without ranks, are in tests/config.
@pytest.mark.parametrize(("field", "value"), [("strategy", "zero_four"), ("no_such_setting", 1)])
@ranks(2)
def test_an_unknown_config_value_is_an_error_that_names_the_field(rank, field, value):
    model = Net()
    before = [type(p) for p in model.parameters()]
    with pytest.raises(ConfigError, match=rf"^{field}") as caught:
        torch_shard.shard(model, **{field: value})
    assert [type(p) for p in model.parameters()] == before
    assert all_ranks_agree_on(str(caught.value))
    torch_shard.shard(model)  # the same model shards once the value is right


@ranks(2)
def test_a_config_that_is_wrong_on_one_rank_only_is_an_error_on_both(rank):
    model = Net()
    with pytest.raises(ShardError, match=r"strategy|shard"):
        torch_shard.shard(model, ShardConfig(timeout=hasty["timeout"]), **({"strategy": "zero_four"} if rank else {}))
    assert all_ranks_agree_on("error")


# -- the model ----------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_module_already_sharded_is_refused_and_the_first_engine_goes_on(rank):
    model = Net()
    torch_shard.shard(model, **small)
    with pytest.raises(SetupError, match="already sharded"):
        torch_shard.shard(model)
    with pytest.raises(SetupError, match=r"weight is already sharded"):
        torch_shard.shard(model.left)
    with pytest.raises(SetupError, match=r"0\.first\.weight is already sharded"):
        torch_shard.shard(nn.Sequential(model))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.gpu
@pytest.mark.parametrize("other", ["cpu", "another GPU"])
@ranks(2)
def test_parameters_on_several_devices_are_an_error_that_names_one(rank, other):
    if other != "cpu" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    mine = torch.device("cuda", rank % torch.cuda.device_count())
    other = torch.device("cpu") if other == "cpu" else torch.device("cuda", 1 - rank)
    model = Net().to(mine)
    model.right.to(other)
    with pytest.raises(SetupError, match=rf"right\.weight is on {other}"):
        torch_shard.shard(model)


def different(model, how):
    if how == "shape":
        model.right.weight = nn.Parameter(torch.zeros(4, 5))
    elif how == "dtype":
        model.right.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    elif how == "requires_grad":
        model.right.weight.requires_grad_(False)
    elif how == "name":
        model.right.register_parameter("other", model.right._parameters.pop("weight"))
    else:
        model.left = nn.Linear(4, 4, bias=False)
        model.right = nn.Linear(4, 4).double()


@pytest.mark.parametrize("how", ["shape", "dtype", "requires_grad", "name", "in two layers"])
@ranks(2, exhaustive=(3,))
def test_different_models_are_an_error_that_names_the_first_difference(rank, world_size, how):
    model = Net()
    last = world_size - 1
    if rank == last:
        different(model, how)
    named = r"left\.bias" if how == "in two layers" else r"right\.(weight|other)"
    with pytest.raises(SetupError, match=rf"{named}.*rank {last}|rank {last}.*{named}") as caught:
        torch_shard.shard(model)
    assert how != "in two layers" or "right" not in str(caught.value).split("left.bias")[0]
    assert all_ranks_agree_on(str(caught.value))
    assert not any(isinstance(p, torch_shard.ShardTensor) for p in model.parameters())


@ranks(2)
def test_a_model_that_cannot_be_sharded_on_one_rank_is_an_error_on_all(rank):
    model = Net()
    if rank == 1:  # the weight is still held by a graph
        kept = model.right(torch.ones(4))
        assert kept.requires_grad
    with pytest.raises(SetupError, match=r"right\.weight.*graph"):
        torch_shard.shard(model)


@ranks(2)
def test_a_parameter_added_after_sharding_is_an_error_that_names_it(rank):
    model = Net()
    torch_shard.shard(model, **small)
    model.first.adapter = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ReplacedParameterError, match=r"first\.adapter\.0\.weight"):
        model.first(torch.ones(4))
    del model.first.adapter
    step(model)
    model.left.extra = nn.Parameter(torch.zeros(4))
    with pytest.raises(ReplacedParameterError, match=r"left\.extra"):
        step(model)
    del model.left.extra
    step(model)
    model.added = nn.Linear(4, 4)
    with pytest.raises(ReplacedParameterError, match=r"added\.weight"):
        step(model)


# -- sharded parameters used as whole ones ------------------------------------------------------------------------------


@ranks(2)
def test_saving_the_shards_is_an_error_that_names_the_alternative(rank, tmp_path):
    model = Net()
    engine = torch_shard.shard(model, alone="error", **small)
    optimizer = torch.optim.Adam(model.parameters())
    step(model, optimizer)
    path = tmp_path / f"{rank}.pt"
    with pytest.raises(ShardPicklingError, match=r"first\.weight.*engine\.state_dict"):
        torch.save(model.state_dict(), path)
    with pytest.raises(ShardPicklingError, match="optim_state_dict"):
        torch.save(optimizer.state_dict(), path)
    with pytest.raises(ShardPicklingError):
        torch.save(model, path)
    torch.save(engine.state_dict(rank0_only=False), path)
    assert torch.load(path)["first.weight"].shape == (4, 4)


# -- copies -------------------------------------------------------------------------------------------------------------


class CopiedInside(nn.Linear):
    def forward(self, x):
        copy.deepcopy(self)
        return super().forward(x)


@ranks(2)
def test_deepcopy_inside_forward_is_an_error_that_names_the_unit(rank):
    model = nn.Sequential(nn.Linear(4, 4), CopiedInside(4, 4))
    torch_shard.shard(model, **small)
    with pytest.raises(ShardError, match=r"deepcopy.*'1'|deepcopy.*1\.weight") as caught:
        step(model)
    assert all_ranks_agree_on(str(caught.value))
    model[1].__class__ = nn.Linear
    step(model)
