"""The functions of torch_shard.optim_state: from every form of optimizer state to every other, on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType

from tests.compat.harness import Pair, batch, plain_backward
from tests.optim.helpers import O, Odd, backward_both, same_optimizers, trainable
from tests.optim.matrix_optimizers import advance, maker
from tests.support.marks import exhaustive, quick
from tests.support.optimizer_state import by_name
from tests.support.ranks import ranks
from torch_shard import ShardTensor, optim_state
from torch_shard.errors import ConfigError, StateDictError
from torch_shard.optim_state import OptimStateKeyType


def adam(model: Any) -> Any:
    """Two groups, a maximum of squares, and a parameter that never gets a gradient."""
    params = trainable(model)
    return O.AdamW([{"params": params[:3], "amsgrad": True}, {"params": params[3:], "lr": 0.02}], lr=0.01)


MAKE = {"AdamW": adam, "SGD": lambda m: O.SGD(trainable(m), lr=0.1, momentum=0.9), "Muon": maker("Muon")}


def trained(name: str, rank: int, world_size: int, steps: int = 3) -> Pair:
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name], unit_bytes=300)
    for model in (pair.model, pair.plain):
        model.leave_out = name == "AdamW"  # so `extra` has no state
    advance(pair, range(steps))
    return pair


def same_dicts(found: Any, wanted: Any, where: str = "") -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, value in wanted.items():
            same_dicts(found[key], value, f"{where} {key}")
    elif isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.device.type == "cpu", where
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for one, other in zip(found, wanted, strict=True):
            same_dicts(one, other, where)
    else:
        assert found == wanted, where


def goes_on(pair: Pair, loaded: dict[str, Any]) -> None:
    """A new optimizer with this state trains as the plain one does."""
    kind = type(pair.optimizer)
    groups = [{**g, "params": list(g["params"])} for g in pair.optimizer.param_groups]
    pair.optimizer = kind(groups)
    pair.optimizer.load_state_dict(loaded)
    advance(pair, range(10, 13))


@pytest.mark.parametrize("name", quick(MAKE, ["AdamW"]))
@ranks(2, exhaustive=(1, 3, 4))
def test_full_state_is_that_of_the_plain_optimizer_by_name(rank, world_size, name):
    pair = trained(name, rank, world_size)
    full = optim_state.full_optim_state_dict(pair.model, pair.optimizer)
    assert (full != {}) == (rank == 0)
    everywhere = optim_state.full_optim_state_dict(
        pair.model, pair.optimizer, optim_input=pair.optimizer.param_groups, rank0_only=False, group=dist.group.WORLD
    )
    for found in (full, everywhere, optim_state.optim_state_dict(pair.model, pair.optimizer)):
        if found:
            same_dicts(found, by_name(pair.plain, pair.plain_optimizer))


@pytest.mark.parametrize("name", quick(MAKE, ["Muon"]))
@ranks(2, exhaustive=(1, 3, 4))
def test_full_state_on_every_rank_is_cut(rank, world_size, name):
    pair = trained(name, rank, world_size)
    full = optim_state.full_optim_state_dict(pair.model, pair.optimizer, rank0_only=False)
    goes_on(pair, optim_state.shard_full_optim_state_dict(full, pair.model, optim=pair.optimizer))


@pytest.mark.parametrize("name", quick(MAKE, ["AdamW"]))
@pytest.mark.parametrize("keys", ["names", *exhaustive("names, one without state", "numbers")])
@ranks(2, exhaustive=(1, 3, 4))
def test_full_state_on_rank_0_is_scattered(rank, world_size, keys, name):
    pair = trained(name, rank, world_size)
    full = (
        copy.deepcopy(pair.plain_optimizer.state_dict())
        if keys == "numbers"
        else by_name(pair.plain, pair.plain_optimizer)
    )
    if keys == "names, one without state":
        full["state"].setdefault("extra", {})
    given = full if rank == 0 else None
    loaded = optim_state.scatter_full_optim_state_dict(given, pair.model, optim=pair.optimizer)
    params = [p for group in pair.optimizer.param_groups for p in group["params"]]
    for number, own in loaded["state"].items():
        for key, value in own.items():
            if key != "step" and name != "Muon":
                assert type(value) is ShardTensor and value.shape == params[number].shape
    goes_on(pair, loaded)


@pytest.mark.parametrize("name", quick(MAKE, ["Muon"]))
@ranks(2, exhaustive=(1, 3, 4))
def test_sharded_state_is_saved_by_dcp_and_goes_back(rank, world_size, name, tmp_path):
    pair = trained(name, rank, world_size)
    sharded = optim_state.sharded_optim_state_dict(pair.model, pair.optimizer)
    for own in sharded["state"].values():
        assert all(type(v) is ShardTensor for k, v in own.items() if k != "step" and v.dim())
    paths = [str(tmp_path)]
    dist.broadcast_object_list(paths)
    dcp.save(sharded, checkpoint_id=paths[0])
    with torch.no_grad():
        for own in sharded["state"].values():
            for value in own.values():
                value.fill_(7.0)
    dcp.load(sharded, checkpoint_id=paths[0])
    goes_on(pair, optim_state.flatten_sharded_optim_state_dict(sharded, pair.model, pair.optimizer))


@pytest.mark.parametrize("name", quick(MAKE, ["AdamW"]))
@ranks(2)
def test_state_of_a_plain_optimizer_goes_in_and_comes_out(rank, world_size, name):
    pair = trained(name, rank, world_size)
    plain = copy.deepcopy(pair.plain_optimizer.state_dict())
    full = optim_state.optim_state_dict(pair.model, pair.optimizer)
    for key_type in (OptimStateKeyType.PARAM_ID, TorchKeyType.PARAM_ID):
        out = optim_state.rekey_optim_state_dict(full, key_type, pair.model, optim=pair.optimizer)
        same_dicts(out, plain)
    pair.plain_optimizer.load_state_dict(out)
    named = optim_state.rekey_optim_state_dict(
        plain, OptimStateKeyType.PARAM_NAME, pair.plain, optim=pair.plain_optimizer
    )
    same_dicts(named, by_name(pair.plain, pair.plain_optimizer))
    loaded = optim_state.optim_state_dict_to_load(pair.model, pair.optimizer, plain)
    goes_on(pair, loaded)


@ranks(2)
def test_numbers_follow_the_order_of_what_an_optimizer_is_made_from(rank, world_size):
    pair = trained("AdamW", rank, world_size)
    groups = [{"params": list(g["params"])} for g in pair.optimizer.param_groups]
    full = optim_state.optim_state_dict(pair.model, pair.optimizer)
    found = optim_state.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, pair.model, optim_input=groups)
    again = optim_state.rekey_optim_state_dict(found, OptimStateKeyType.PARAM_NAME, pair.model, optim_input=groups)
    same_dicts(found, pair.plain_optimizer.state_dict())
    same_dicts(again, full)


@ranks(2)
@pytest.mark.parametrize("convert", ["shard_full_optim_state_dict", *exhaustive("scatter_full_optim_state_dict")])
def test_full_state_is_loaded_without_the_optimizer_by_what_it_is_made_from(convert, rank, world_size):
    pair = trained("AdamW", rank, world_size)
    groups = [{"params": list(g["params"])} for g in pair.optimizer.param_groups]
    full = optim_state.full_optim_state_dict(pair.model, pair.optimizer, rank0_only=False)
    goes_on(pair, getattr(optim_state, convert)(full, pair.model, groups))

    def momentum(model):
        return O.SGD(model.parameters(), lr=0.1, momentum=0.9)

    pair = Pair(Odd, rank, world_size, optimizer=momentum, unit_bytes=300)
    advance(pair, range(3))
    full = optim_state.full_optim_state_dict(pair.model, pair.optimizer, rank0_only=False)
    goes_on(pair, getattr(optim_state, convert)(full, pair.model))


@ranks(2)
def test_state_can_be_loaded_directly_and_converted_by_itself(rank, world_size):
    pair = trained("AdamW", rank, world_size)
    given = optim_state.optim_state_dict(pair.model, pair.optimizer, copy.deepcopy(pair.optimizer.state_dict()))
    same_dicts(given, by_name(pair.plain, pair.plain_optimizer))
    advance(pair, range(3, 5))
    pair.plain_optimizer.load_state_dict(
        optim_state.rekey_optim_state_dict(given, OptimStateKeyType.PARAM_ID, pair.plain, optim=pair.plain_optimizer)
    )
    optim_state.optim_state_dict_to_load(pair.model, pair.optimizer, given, load_directly=True)
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    backward_both(pair, 5)


@ranks(2)
def test_what_does_not_fit_is_an_error_on_all_ranks(rank, world_size):
    pair = trained("AdamW", rank, world_size)
    before = copy.deepcopy(optim_state.optim_state_dict(pair.model, pair.optimizer))
    wrong = copy.deepcopy(before)
    wrong["state"]["up.weight"]["exp_avg"] = torch.zeros(3, 2)
    with pytest.raises(StateDictError, match=r"up\.weight: exp_avg has shape \(3, 2\)"):
        optim_state.scatter_full_optim_state_dict(wrong if rank == 0 else None, pair.model, optim=pair.optimizer)
    with pytest.raises(StateDictError, match=r"rank 0: .* needs a dict"):
        optim_state.scatter_full_optim_state_dict(None, pair.model, optim=pair.optimizer)
    short = {"state": {}, "param_groups": before["param_groups"][:1]}
    with pytest.raises(StateDictError, match="1 parameter groups where the optimizer has 2"):
        optim_state.optim_state_dict_to_load(pair.model, pair.optimizer, short, load_directly=True)
    with pytest.raises(StateDictError, match="2 parameter groups where the optimizer has 1"):
        optim_state.shard_full_optim_state_dict(before, pair.model)
    groupless = {"state": pair.optimizer.state_dict()["state"]}
    for convert in (
        lambda: optim_state.optim_state_dict(pair.model, pair.optimizer, groupless),
        lambda: optim_state.rekey_optim_state_dict(groupless, OptimStateKeyType.PARAM_NAME, pair.model),
    ):
        with pytest.raises(StateDictError, match=f"rank {rank}: .* needs a dict with 'state' and 'param_groups'"):
            convert()
    for call in (
        lambda: optim_state.full_optim_state_dict(pair.plain, pair.plain_optimizer),
        lambda: optim_state.rekey_optim_state_dict(before, "names", pair.model, optim=pair.optimizer),
    ):
        with pytest.raises(ConfigError):
            call()
    same_dicts(optim_state.optim_state_dict(pair.model, pair.optimizer), before)
    plain_backward(pair.model, batch(rank, 5))
