"""Wrong input is an error that names the parameter or argument, on every rank, and the process group lives on.

The rank pool checks after every test that the default process group still works.
"""

from __future__ import annotations

import copy
import os
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.ranks import RankFailure, ranks, run
from torch_shard.config import ShardConfig
from torch_shard.errors import (
    ConfigError,
    DivergenceError,
    MissingRankError,
    NeedsGatherError,
    ReplacedParameterError,
    SetupError,
    ShardError,
    ShardPicklingError,
    StateDictError,
)

pytestmark = pytest.mark.exhaustive  # minutes in all

SHORT = 3.0  # seconds that a rank waits for a partner in these tests


class Net(nn.Module):
    """Three layers, each a unit of its own under `small`; `order` says which run."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.order = ["first", "left", "right", "last"]

    def forward(self, x):
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


small = {"units": [nn.Linear], "timeout": SHORT}


def step(model, optimizer=None):
    model(torch.ones(2, 4)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def all_ranks_agree_on(text):
    """Whether every rank saw an error (its text), which also shows that the process group works. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return all(everyone)


# -- configuration ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("strategy", "zero_four"),
        ("strategy", "hybrid_shard"),
        ("unit_bytes", 0),
        ("units", "Linear"),
        ("prefetch", -1),
        ("timeout", 0),
        ("ignore", [3]),
        ("init_fn", "zeros"),
        ("sync_module_states", "yes"),
        ("no_such_setting", 1),
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
        torch_shard.shard(model, ShardConfig(timeout=SHORT), **({"strategy": "zero_four"} if rank else {}))
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


@ranks(2, 3)
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


# -- ranks that part ways -----------------------------------------------------------------------------------------------


def part_ways(rank, world_size, when, change):
    model = Net()
    torch_shard.shard(model, **small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(when):
        step(model, optimizer)
    before = [p.to_local().clone() for p in model.parameters()]
    if rank == world_size - 1:
        if change == "swapped":
            model.order = ["first", "right", "left", "last"]
        elif change == "skipped":
            model.order = ["first", "right", "last"]
        elif change == "more":
            model.order = ["first", "left", "right", "last", "left"]
        else:
            model.order = ["first", "left", "right"]
    with pytest.raises(ShardError) as caught:
        step(model, optimizer)
    text = str(caught.value)
    assert isinstance(caught.value, DivergenceError), text
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old), "an optimizer step was made"
    assert f"rank {world_size - 1}" in text
    assert {"swapped": "right", "skipped": "right", "more": "left", "fewer": "right"}[change] in text
    assert __file__ in text
    assert all_ranks_agree_on(text)
    # Where no rank was left alone in a collective the engine goes on; otherwise it says so, and a new one works.
    model.order = ["first", "left", "right", "last"]
    optimizer.zero_grad()
    if when == 0:
        step(model, optimizer)
    else:
        with pytest.raises(DivergenceError, match="earlier error"):
            step(model, optimizer)
        model = Net()
        torch_shard.shard(model, **small)
        step(model)


@pytest.mark.parametrize("change", ["swapped", "skipped", "more", "fewer"])
@pytest.mark.parametrize("when", [0, 4], ids=["first", "fifth"])
@ranks(2)
def test_ranks_that_run_different_units_are_an_error_before_the_step(rank, world_size, when, change):
    part_ways(rank, world_size, when, change)


@ranks(3)
def test_one_rank_of_three_that_runs_other_units_is_named(rank, world_size):
    part_ways(rank, world_size, 4, "swapped")


@pytest.mark.parametrize("when", [0, 4], ids=["first", "fifth"])
@ranks(2)
def test_different_units_without_gradients_are_an_error(rank, world_size, when):
    model = Net()
    torch_shard.shard(model, **small)
    with torch.no_grad():
        for _ in range(when):
            model(torch.ones(2, 4))
        if rank == 1:
            model.order = ["first", "right", "left", "last"]
        with pytest.raises(DivergenceError, match=r"rank 1.*right"):
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))  # at the latest when the next forward begins
    assert all_ranks_agree_on("error")


LONELY = {
    "forward": (lambda e, m: m(torch.ones(2, 4)), "forward"),
    "evaluation": (lambda e, m: torch.no_grad()(m)(torch.ones(2, 4)), "forward"),
    "norm": (lambda e, m: m.left.weight.norm(), r"left\.weight"),
    "grad_norm": (lambda e, m: m.left.weight.grad.norm(), r"left\.weight"),
    "clip": (lambda e, m: e.clip_grad_norm_(1.0), "norm"),
    "full_tensor": (lambda e, m: m.left.weight.full_tensor(), r"full_tensor of left\.weight"),
    "gathered": (lambda e, m: e.gathered(m.left).__enter__(), "gathered"),
    "save": (lambda e, m: e.state_dict(), "state_dict"),
}


@pytest.mark.parametrize("what", LONELY)
@ranks(2)
def test_an_operation_that_one_rank_alone_runs_is_an_error_in_time(rank, what):
    model = Net()
    engine = torch_shard.shard(model, **small)
    operation, named = LONELY[what]
    step(model)
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(MissingRankError, match=named) as caught:
            operation(engine, model)
        assert time.monotonic() - start < SHORT + 3
        assert "rank 1" in str(caught.value)
        assert __file__ in str(caught.value)
    dist.barrier()  # the user's own process group is as it was


@ranks(2)
def test_an_operation_that_one_rank_alone_runs_while_the_other_trains_is_an_error_on_both(rank):
    model = Net()
    torch_shard.shard(model, **small)
    step(model)
    with pytest.raises((DivergenceError, MissingRankError), match=r"left\.weight") as caught:
        if rank == 0:
            model.left.weight.norm()
        step(model)
    assert __file__ in str(caught.value)
    dist.barrier()


@ranks(2)
def test_a_unit_that_only_one_rank_uses_is_an_error(rank):
    model = Net()
    torch_shard.shard(model, **small)
    with pytest.raises(DivergenceError, match="left"):
        loss = model.first(torch.ones(2, 4)).sum()
        if rank == 0:
            loss = loss + model.left(torch.ones(2, 4)).sum()
        loss.backward()
    assert all_ranks_agree_on("error")


@ranks(2)
def test_uneven_numbers_of_validation_batches_are_an_error(rank):
    model = Net()
    torch_shard.shard(model, **small)
    step(model)
    seen = 0
    error = None
    try:
        with torch.no_grad():
            for _ in range(3 - rank):
                model(torch.ones(2, 4))
                seen += 1
        step(model)  # rank 1 is through, and trains
    except ShardError as problem:
        error = problem
    assert seen == 2, "the batches that both have"
    assert isinstance(error, (DivergenceError, MissingRankError)), error
    assert "forward" in str(error)
    dist.barrier()


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


NEEDS_WHOLE = {
    "matmul": lambda p: p @ p,
    "view": lambda p: p.view(-1),
    "index": lambda p: p[0],
    "item": lambda p: p[0, 0].item(),
    "transpose": lambda p: p.t(),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "data_ptr": lambda p: p.data_ptr(),
    "sum over a dimension": lambda p: p.sum(0),
    "cat": lambda p: torch.cat([p, p]),
    "svd": lambda p: torch.linalg.svd(p),
    "set one row": lambda p: p.data.__setitem__(0, 1.0),
    "into a plain tensor": lambda p: torch.zeros(4, 4).copy_(p),
    "sort": lambda p: p.sort(),
    "topk": lambda p: p.topk(2),
}


@pytest.mark.parametrize("operation", NEEDS_WHOLE)
@ranks(2)
def test_an_operation_that_needs_the_whole_names_the_parameter_and_gathered(rank, operation):
    model = Net()
    engine = torch_shard.shard(model, **small)
    with torch.no_grad(), pytest.raises(NeedsGatherError, match=r"left\.weight.*gathered"):
        NEEDS_WHOLE[operation](model.left.weight)
    with torch.no_grad(), engine.gathered():
        NEEDS_WHOLE[operation](model.left.weight)
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


# -- copies and deaths --------------------------------------------------------------------------------------------------


class CopiesItself(Net):
    def forward(self, x):
        x = self.first(x)
        copy.deepcopy(self.left)
        return self.left(x)


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


def dies(rank, world_size, how):
    model = Net()
    torch_shard.shard(model, **{**small, "timeout": 5.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if rank == 1:
        if how == "in forward":
            model.right.register_forward_pre_hook(lambda *_: os._exit(1))
        elif how == "in backward":
            model.right.weight.register_hook(lambda *_: os._exit(1))
        else:
            os._exit(1)
    start = time.monotonic()
    try:
        for _ in range(2):
            step(model, optimizer)
    except ShardError as error:
        return time.monotonic() - start, type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("how", ["in forward", "in backward", "between steps"])
def test_a_rank_that_dies_does_not_hang_the_others(how):
    survivor, _ = run(2, dies, how, may_die=(1,), group_timeout=10, timeout=30)
    assert survivor is not None
    seconds, kind, text = survivor
    assert seconds < 8
    assert kind == "MissingRankError"
    assert "rank 0" in text or "rank 1" in text


def fails(rank, world_size):
    model = Net()
    torch_shard.shard(model, **small)
    step(model)
    if rank == 1:
        raise ValueError("rank 1 gives up")
    step(model)


def test_a_rank_that_raises_does_not_hang_the_others():
    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 1 gives up"):
        run(2, fails, timeout=30, fresh=True)
    assert time.monotonic() - start < 20
