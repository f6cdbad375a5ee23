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
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.config.shard_config import ShardConfig
from torch_shard.errors import (
    ConfigError,
    NeedsGatherError,
    ReplacedParameterError,
    SetupError,
    ShardError,
    ShardPicklingError,
    StateDictError,
)

# -- configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "zero_four"),
        ("no_such_setting", 1),
        # All of them, without ranks, are in test_config.py.
        *exhaustive(
            ("strategy", "hybrid_zero_four"),
            ("unit_bytes", 0),
            ("units", "Linear"),
            ("prefetch", -1),
            ("timeout", 0),
            ("ignore", [3]),
            ("init_fn", "zeros"),
            ("sync_module_states", "yes"),
        ),
    ],
)
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


@ranks(2)
def test_units_that_name_an_unknown_parameter_are_an_error(rank):
    with pytest.raises(ShardError, match=r"no\.such\.weight"):
        torch_shard.shard(Net(), units=[["first.weight", "no.such.weight"]])
    with pytest.raises(ShardError, match="no_such_pattern"):
        torch_shard.shard(Net(), units=["no_such_pattern*"])


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
@ranks(2)
def test_parameters_on_mixed_devices_are_an_error_that_names_one(rank, device):
    if device.type == "cpu":
        pytest.skip("needs a device besides the CPU")
    model = Net().to(device)
    model.right.to("cpu")
    with pytest.raises(SetupError, match=r"right\.(weight|bias) is on cpu"):
        torch_shard.shard(model)


@pytest.mark.gpu
@ranks(2)
def test_parameters_on_another_gpu_are_an_error_that_names_one(rank):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    mine, other = torch.device("cuda", rank), torch.device("cuda", 1 - rank)
    model = Net().to(mine)
    model.right.to(other)
    with pytest.raises(SetupError, match=rf"right\.weight is on {other}"):
        torch_shard.shard(model)


@ranks(2, exhaustive=(3,))
def test_different_models_are_an_error_that_names_the_first_difference(rank, world_size):
    model = Net()
    if rank == world_size - 1:
        model.left = nn.Linear(4, 4, bias=False)
        model.right = nn.Linear(4, 4).double()
    with pytest.raises(
        SetupError, match=rf"left\.bias.*rank {world_size - 1}|rank {world_size - 1}.*left\.bias"
    ) as caught:
        torch_shard.shard(model)
    assert "right" not in str(caught.value).split("left.bias")[0]
    assert all_ranks_agree_on(str(caught.value))
    assert not any(isinstance(p, torch_shard.ShardTensor) for p in model.parameters())


@pytest.mark.parametrize("difference", ["shape", "dtype", "requires_grad", "name"])
@ranks(2)
def test_any_difference_between_the_models_is_named(rank, difference):
    model = Net()
    if rank == 1:
        if difference == "shape":
            model.right.weight = nn.Parameter(torch.zeros(4, 5))
        elif difference == "dtype":
            model.right.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        elif difference == "requires_grad":
            model.right.weight.requires_grad_(False)
        else:
            model.right.register_parameter("other", model.right._parameters.pop("weight"))
    with pytest.raises(SetupError, match=r"right\.(weight|other)"):
        torch_shard.shard(model)


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
    step(model)
    model.left.extra = nn.Parameter(torch.zeros(4))
    with pytest.raises(ReplacedParameterError, match=r"left\.extra"):
        step(model)
    del model.left.extra
    step(model)
    model.added = nn.Linear(4, 4)
    with pytest.raises(ReplacedParameterError, match=r"added\.weight"):
        step(model)


@ranks(2)
def test_a_parameter_added_before_the_first_step_is_an_error_that_names_it(rank):
    model = Net()
    torch_shard.shard(model, **small)
    model.first.adapter = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ReplacedParameterError, match=r"first\.adapter\.0\.weight"):
        model.first(torch.ones(4))


# -- sharded parameters used as whole ones ------------------------------------------------------------------------------


@ranks(2)
def test_saving_the_shards_is_an_error_that_names_the_alternative(rank, tmp_path):
    model = Net()
    engine = torch_shard.shard(model, **small)
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


NEEDS_FULL = {
    "numpy": lambda p: p.detach().numpy(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "in place": lambda p: p.detach().t_(),
}


@pytest.mark.parametrize("operation", NEEDS_FULL)
@ranks(2)
def test_an_operation_that_needs_the_whole_names_the_parameter_and_gathered(rank, operation):
    model = Net()
    engine = torch_shard.shard(model, **small)
    with torch.no_grad(), pytest.raises(NeedsGatherError, match=r"left\.weight.*gathered"):
        NEEDS_FULL[operation](model.left.weight)
    with torch.no_grad(), engine.gathered():
        NEEDS_FULL[operation](model.left.weight)
    step(model)


# -- state dicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
@ranks(2)
def test_a_state_dict_that_does_not_fit_is_listed_in_full_and_not_loaded(rank, strict):
    model = Net()
    engine = torch_shard.shard(model, **small)
    before = [p.to_local().clone() for p in model.parameters()]
    wrong = {name: torch.full(p.shape, 7.0) for name, p in model.named_parameters()}
    del wrong["first.weight"], wrong["last.bias"]
    wrong["left.weight"] = torch.zeros(4, 5)
    wrong["right.bias"] = torch.zeros(3)
    wrong["head.weight"] = torch.zeros(1)
    wrong["tail"] = torch.zeros(1)
    with pytest.raises(StateDictError) as caught:
        engine.load_state_dict(wrong, strict=strict)
    listed = ["left.weight", "right.bias", "[4, 5]"]
    if strict:
        listed += ["first.weight", "last.bias", "head.weight", "tail"]
    for name in listed:
        assert name in str(caught.value)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old)
    assert all_ranks_agree_on(str(caught.value))


@ranks(2)
def test_a_state_dict_that_does_not_fit_on_one_rank_is_loaded_on_none(rank):
    model = Net()
    engine = torch_shard.shard(model, **small)
    before = [p.to_local().clone() for p in model.parameters()]
    state = {name: torch.full(p.shape, 7.0) for name, p in model.named_parameters()}
    if rank == 1:
        state["left.weight"] = torch.zeros(5)
    with pytest.raises(StateDictError, match=r"left\.weight"):
        engine.load_state_dict(state)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old)


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
