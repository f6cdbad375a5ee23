"""State dicts of models of ``torch_shard.fsdp``: torch's three types, optimizer state, and torch.distributed.checkpoint."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import torch_shard.fsdp
from tests.compat.harness import MLP, Block
from tests.fsdp import programs
from tests.fsdp.programs import TORCH, build, fsdp2, package, sgd, train
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ConfigError, SetupError
from torch_shard.fsdp import FullStateDictConfig, OptimStateKeyType, StateDictType, fully_shard
from torch_shard.fsdp import FullyShardedDataParallel as FSDP
from torch_shard.fsdp.wrap import ModuleWrapPolicy

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def one(net=None):
    return FSDP(build() if net is None else net, auto_wrap_policy=ModuleWrapPolicy({Block}))


def one_sharded():
    model = one()
    FSDP.set_state_dict_type(model, SHARDED)
    return model


def two(net=None):
    return fsdp2(torch_shard.fsdp, net)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def whole(model):
    """The full parameters by name. Collective."""
    return {n: programs.whole(p) for n, p in model.named_parameters()}


def clear(model):
    """Fill all parameters with zeros."""
    model.apply(lambda m: [nn.init.zeros_(p) for p in m.parameters(recurse=False)] and None)


@ranks(2)
def test_state_dicts_are_whole_by_default_and_of_the_type_that_is_set(rank):
    model, expected = one(), build().state_dict()
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        assert bool(model.state_dict()) == (rank == 0)
    with FSDP.state_dict_type(model, SHARDED):
        sharded, through_dcp = model.state_dict(), get_model_state_dict(model)
        before = FSDP.set_state_dict_type(model, LOCAL)
        assert before.state_dict_type is SHARDED
        local = {key: value.clone() for key, value in model.state_dict().items()}
        for kept in (sharded, through_dcp, local):
            assert all(isinstance(value, ShardTensor) for value in kept.values())
            clear(model)
            model.load_state_dict(kept)
            torch.testing.assert_close({k: v.full_tensor() for k, v in model.state_dict().items()}, dict(expected))
    assert FSDP.get_state_dict_type(model).state_dict_type is FULL
    torch.testing.assert_close(dict(model.state_dict()), dict(expected), rtol=0, atol=0)


@ranks(2)
def test_a_wrapped_part_has_the_type_that_is_set_for_the_model(rank):
    model = one()
    part, holder = model.blocks[1], model.blocks
    expected, whole = dict(build().blocks[1].state_dict()), dict(build().blocks.state_dict())
    torch.testing.assert_close(dict(part.state_dict()), expected, rtol=0, atol=0)
    torch.testing.assert_close(dict(holder.state_dict()), whole, rtol=0, atol=0)  # plain, with wrapped ones inside
    given = part.state_dict(prefix="x.", destination={"y": 1})
    assert given.pop("y") == 1
    torch.testing.assert_close(given, {f"x.{key}": value for key, value in expected.items()}, rtol=0, atol=0)
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        assert list(part.state_dict()) == (list(expected) if rank == 0 else [])
    with FSDP.state_dict_type(model, SHARDED):
        assert all(isinstance(value, ShardTensor) for value in part.state_dict().values())
        kept = part.state_dict()
        clear(part)
        part.load_state_dict(kept)
    torch.testing.assert_close(dict(part.state_dict()), expected, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("set_type", [FULL, *exhaustive(SHARDED, LOCAL)])
def test_dcp_gets_shards_and_whole_tensors_as_its_options_say_whatever_type_is_set(set_type, rank):
    wanted = dict(build().state_dict())
    full = StateDictOptions(full_state_dict=True)
    fresh = FSDP(build())  # not sharded yet
    assert all(isinstance(value, ShardTensor) for value in get_model_state_dict(fresh).values())
    torch.testing.assert_close(get_model_state_dict(FSDP(build()), options=full), wanted, rtol=0, atol=0)
    model = one()
    FSDP.set_state_dict_type(model, set_type)
    sharded = get_model_state_dict(model)
    assert all(isinstance(value, ShardTensor) for value in sharded.values())
    assert all(isinstance(value, ShardTensor) for value in get_model_state_dict(model.blocks[0]).values())
    whole = get_model_state_dict(model, options=full)
    assert all(type(value) is torch.Tensor for value in whole.values())
    torch.testing.assert_close(whole, wanted, rtol=0, atol=0)
    sharded = {key: value.clone() for key, value in sharded.items()}
    for given, options in ((sharded, None), (whole, full)):
        clear(model)
        set_model_state_dict(model, given, options=options)
        torch.testing.assert_close(get_model_state_dict(model, options=full), wanted, rtol=0, atol=0)
    assert FSDP.get_state_dict_type(model).state_dict_type is set_type


@ranks(2)
@pytest.mark.parametrize("make", [*exhaustive(one), two])
def test_whole_and_sharded_dicts_load_before_the_first_forward_and_after(make, rank):
    expected = build().state_dict()
    other = MLP(7).double()
    for ready in (False, True):
        model = make(copy.deepcopy(other))
        if ready:
            train(model, sgd(model), rank, 1)
        model.load_state_dict(expected)
        torch.testing.assert_close(whole(model), dict(expected), rtol=0, atol=0)
    source = two()
    source.load_state_dict(expected)
    model = two(copy.deepcopy(other))
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(whole(model), dict(expected), rtol=0, atol=0)


def continues(make, rank, saved, load, other=None, rtol=0.0, atol=0.0):
    """Train, save, train; load into another model, train: the same losses."""
    model = make()
    optimizer = adam(model)
    train(model, optimizer, rank, 2)
    state = saved(model, optimizer)
    losses = train(model, optimizer, rank, 2)
    again = (other or make)()
    second = adam(again)
    load(again, second, state)
    torch.testing.assert_close(train(again, second, rank, 2), losses, rtol=rtol, atol=atol)


def through_dcp(folder):
    """Functions that save and load, as :func:`continues` takes them, with the functions of torch for state dicts."""

    def save(model, optimizer):
        values, state = get_state_dict(model, optimizer)
        dcp.save({"model": values, "optim": state}, checkpoint_id=folder)

    def load(model, optimizer, _):
        values, state = get_state_dict(model, optimizer)
        dcp.load({"model": values, "optim": state}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state)

    return save, load


@ranks(2)
@pytest.mark.parametrize("make", [one, *exhaustive(one_sharded, two)])
def test_dcp_saves_and_loads_what_get_state_dict_gives(make, rank, tmp_path):
    continues(make, rank, *through_dcp(tmp_path / "step"))


@ranks(2)
@pytest.mark.parametrize("set_type", [LOCAL, *exhaustive(SHARDED)])
def test_dcp_saves_and_loads_what_the_model_gives_itself(set_type, rank, tmp_path):
    model, expected = one(), whole(one())
    with FSDP.state_dict_type(model, set_type):
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "step")
        clear(model)
        assert not any(value.any() for value in whole(model).values())
        values = model.state_dict()
        dcp.load({"model": values}, checkpoint_id=tmp_path / "step")
        model.load_state_dict(values)
    torch.testing.assert_close(whole(model), expected, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("direction", ["from torch", *exhaustive("to torch")])
def test_checkpoints_of_dcp_go_between_torchs_fsdp_and_this_one(direction, rank, tmp_path):
    def theirs():
        return fsdp2(package(TORCH))

    first, second = (theirs, two) if direction == "from torch" else (two, theirs)
    continues(first, rank, *through_dcp(tmp_path / "step"), other=second, rtol=1e-9, atol=1e-11)


@ranks(2)
@pytest.mark.parametrize("make", [two, *exhaustive(one, one_sharded)])
@pytest.mark.parametrize("broadcast", [*exhaustive(False), True])
def test_full_state_dicts_of_dcp_are_whole(make, broadcast, rank):
    taking = StateDictOptions(full_state_dict=True, cpu_offload=broadcast)
    giving = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)

    def save(model, optimizer):
        found = (
            get_model_state_dict(model, options=taking),
            get_optimizer_state_dict(model, optimizer, options=taking),
        )
        assert bool(found[0]) == (rank == 0 or not broadcast)
        tensors = [v for part in (found[0], *found[1].get("state", {}).values()) for v in part.values()]
        assert all(type(value) is torch.Tensor for value in tensors)
        assert not found[0] or found[0]["blocks.1.up.weight"].shape == (14, 7)
        return found

    def load(model, optimizer, state):
        set_model_state_dict(model, state[0], options=giving)
        set_optimizer_state_dict(model, optimizer, state[1], options=giving)

    continues(make, rank, save, load)


@ranks(2)
def test_full_optimizer_state_that_only_its_owners_have_is_refused(rank):
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4))).double()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Muon(model.parameters())
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="optim_state_dict"):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


@ranks(2)
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_model_on_meta_is_loaded_without_to_empty(broadcast, rank):
    with torch.device("meta"):
        model = two(MLP().double())
    values = build().state_dict() if rank == 0 or not broadcast else {}
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast))
    torch.testing.assert_close(whole(model), dict(build().state_dict()), rtol=0, atol=0)


class Scale(nn.Module):
    """A parameter that nothing initialises."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Angles(nn.Module):
    """A buffer that is in no state dict."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0), persistent=False)


class ResetAngles(Angles):
    def reset_parameters(self):
        self.inv_freq.copy_(torch.arange(1.0, 5.0))


def with_block(*layers):
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), *layers), nn.Linear(4, 4))


def two_on_meta(*kinds):
    with torch.device("meta"):
        model = with_block(*(kind() for kind in kinds))
    fully_shard(model[0])
    return fully_shard(model)


@ranks(2)
def test_a_load_does_not_hide_that_nothing_fills_a_buffer_on_meta(rank):
    model = two_on_meta(Angles)
    with pytest.raises(SetupError, match=r"module 0\.1 holds buffers on the meta device"):
        model.load_state_dict(with_block(Angles()).state_dict())


@ranks(2)
def test_a_load_leaves_buffers_outside_the_state_dict_to_reset_parameters(rank):
    with torch.device("meta"):
        model = fully_shard(nn.Sequential(nn.Linear(4, 4), ResetAngles()))
    values = nn.Linear(4, 4).state_dict(prefix="0.")
    model.load_state_dict(values)
    assert torch.equal(model[1].inv_freq, torch.arange(1.0, 5.0))
    torch.testing.assert_close(whole(model), dict(values), rtol=0, atol=0)


@ranks(2)
def test_a_load_leaves_buffers_outside_the_state_dict_to_the_roots_param_init_fn(rank):
    def init(module):
        module.to_empty(device="cpu", recurse=False)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(7.0)

    with torch.device("meta"):
        net = nn.Sequential(FSDP(nn.Linear(4, 4)), Angles())
    model = FSDP(net, param_init_fn=init)
    model.load_state_dict({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)})
    assert (model[1].inv_freq == 7).all() and (whole(model)["0.weight"] == 1).all()


@ranks(2)
def test_the_rest_of_a_model_on_meta_is_initialised_when_a_part_is_loaded(rank):
    model, values = two_on_meta(), with_block()[0].state_dict()
    model[0].load_state_dict(values)
    torch.testing.assert_close(whole(model[0]), dict(values), rtol=0, atol=0)
    assert whole(model[1])["weight"].std() > 0.05


@ranks(2)
def test_a_parameter_on_meta_that_nothing_initialises_is_loaded_in_a_wrapped_part(rank):
    model, values = two_on_meta(Scale), with_block(Scale()).state_dict()
    model.load_state_dict(values)
    torch.testing.assert_close(whole(model), dict(values), rtol=0, atol=0)


@ranks(2)
def test_a_load_on_meta_whose_names_a_hook_changes_and_one_that_lacks_names_end_as_in_torch(rank):
    def rename(module, state, *_):
        for name in list(state):
            state[name.removeprefix("module.")] = state.pop(name)

    model, values = two_on_meta(Scale), with_block(Scale()).state_dict()
    model.register_load_state_dict_pre_hook(rename)
    with pytest.raises(RuntimeError, match="Missing key"):
        two_on_meta(Scale).load_state_dict({})
    model.load_state_dict({f"module.{name}": value for name, value in values.items()})
    torch.testing.assert_close(whole(model), dict(values), rtol=0, atol=0)


@ranks(2)
def test_to_empty_needs_no_initialisation_of_wrapped_parts(rank):
    model = two_on_meta(Scale, Angles)
    model.to_empty(device="cpu")
    assert all((value == 0).all() for value in (*whole(model).values(), *model.buffers()))


@ranks(2)
@pytest.mark.parametrize("form", [*exhaustive("optim_state_dict"), "full", *exhaustive("scatter"), "sharded"])
def test_optimizer_state_goes_through_the_functions_of_the_class(form, rank):
    def save(model, optimizer):
        values = {key: value.clone() for key, value in model.state_dict().items()}
        if form == "optim_state_dict":
            state = FSDP.optim_state_dict(model, optimizer)
        elif form == "sharded":
            state = FSDP.sharded_optim_state_dict(model, optimizer)
            state = {**state, "state": {n: {k: v.clone() for k, v in s.items()} for n, s in state["state"].items()}}
        else:
            state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=form == "scatter")
        assert form == "scatter" and rank or "blocks.1.up.weight" in state["state"]
        return values, state

    def load(model, optimizer, saved):
        model.load_state_dict(saved[0])
        state = saved[1]
        if form == "optim_state_dict":
            state = FSDP.optim_state_dict_to_load(model, optimizer, state)
        elif form == "sharded":
            state = FSDP.flatten_sharded_optim_state_dict(state, model, optimizer)
        elif form == "scatter":
            state = FSDP.scatter_full_optim_state_dict(state, model, optim=optimizer)
        else:
            numbered = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
            assert set(numbered["state"]) == set(range(22))
            state = FSDP.shard_full_optim_state_dict(state, model, optim=optimizer)
        optimizer.load_state_dict(state)

    continues(one, rank, save, load)


@ranks(2, exhaustive=(3,))
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_for_sharded_optimizer_state_of_torchs_documentation(rank, world_size, tmp_path):
    def save(model, optimizer):
        with FSDP.state_dict_type(model, SHARDED):
            state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
            dcp.save(state, checkpoint_id=tmp_path)

    def load(model, optimizer, _):
        with FSDP.state_dict_type(model, SHARDED):
            state = {"model": model.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path)
            model.load_state_dict(state["model"])
            reader = dcp.FileSystemReader(tmp_path)
            found = load_sharded_optimizer_state_dict(state["model"], "optimizer", reader)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, found["optimizer"]))

    continues(one, rank, save, load)


@ranks(2)
@pytest.mark.parametrize("first", ["checkpointing", "wrapping"])
def test_activation_checkpointing_leaves_no_trace_in_names(first, rank):
    def check(model):
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))

    net = build()
    if first == "checkpointing":
        check(net)
    model = one(net)
    if first == "wrapping":
        check(model)
    optimizer = adam(model)
    train(model, optimizer, rank, 1)
    names = list(build().state_dict())
    assert list(model.state_dict()) == names
    state = FSDP.optim_state_dict(model, optimizer)
    assert sorted(state["state"]) == sorted(names)
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state))
    dist.barrier()
