"""State dicts in every form, by the engine's own methods and by those that code for torch's FSDP uses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.odd_model import Net, batch, build
from tests.support.ranks import ranks
from torch_shard import ShardTensor, optim_state
from torch_shard import state_dict_type as types
from torch_shard.errors import ConfigError
from torch_shard.state.optimizer_state import load_by_number
from torch_shard.state_dict_type import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

FULL, SHARDED, LOCAL = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT


def models(**settings: Any) -> tuple[Net, Net, torch_shard.Engine]:
    plain, model = build(), build()
    return plain, model, torch_shard.shard(model, **settings)


def same(found: dict[str, Any], plain: torch.nn.Module) -> None:
    wanted = plain.state_dict()
    assert list(found) == list(wanted)
    for key, value in wanted.items():
        assert type(found[key]) is torch.Tensor
        assert torch.equal(found[key], value) and found[key].stride() == value.stride(), key


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_sharded_form_is_of_global_shape_shares_memory_and_loads(rank: int, strategy: str) -> None:
    plain, model, engine = models(strategy=strategy)
    found = engine.state_dict(form="sharded")
    wanted = plain.state_dict()
    assert list(found) == list(wanted)
    for name, p in model.named_parameters():
        assert type(found[name]) is ShardTensor and found[name].shape == wanted[name].shape
        assert found[name].to_local().data_ptr() == p.to_local().data_ptr()
        assert torch.equal(found[name].full_tensor(), wanted[name])
    kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine.load_state_dict(kept)
    same(engine.state_dict(rank0_only=False), plain)


@pytest.mark.parametrize("rank0_only", [False, True])
@ranks(2, exhaustive=(1, 3))
def test_full_can_be_set_for_the_models_own_state_dict(rank: int, rank0_only: bool) -> None:
    plain, model, engine = models()
    with types.state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=rank0_only)):
        found = model.state_dict()
        inside = engine.state_dict(form="sharded")  # the engine's own methods don't ask what is set
    if rank0_only and rank:
        assert not found
    else:
        same(found, plain)
    for held in (inside, model.state_dict()):
        assert all(type(v) is ShardTensor for k, v in held.items() if k in dict(model.named_parameters()))


@ranks(2)
def test_full_works_below_another_module_which_keeps_its_own_entries(rank: int) -> None:
    plain, model, _ = models()
    a, z = nn.Linear(2, 2), nn.Linear(2, 2)
    outer, reference = (nn.ModuleDict({"a": a, "net": net, "z": z}) for net in (model, plain))
    with types.state_dict_type(model, FULL):
        same(outer.state_dict(), reference)
    with types.state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True)):
        found = outer.state_dict()
    assert list(found) == [name for name in reference.state_dict() if rank == 0 or not name.startswith("net.")]


@pytest.mark.parametrize("form", [FULL, SHARDED])
@ranks(2)
def test_what_is_kept_does_not_change_with_training(rank: int, form: StateDictType) -> None:
    def step() -> None:
        model(batch(rank)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.counted += 1

    _, model, _ = models()
    model.register_buffer("counted", torch.zeros(2))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    step()
    types.set_state_dict_type(model, form)
    best, best_state = model.state_dict(), optim_state.optim_state_dict(model, optimizer)
    step()
    after_two = {name: p.full_tensor() for name, p in model.named_parameters()}
    step()
    model.load_state_dict(best)
    optimizer.load_state_dict(optim_state.optim_state_dict_to_load(model, optimizer, best_state))
    assert torch.equal(model.counted, torch.ones(2))
    step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.full_tensor(), after_two[name], rtol=0, atol=0, msg=name)


@ranks(2)
def test_what_was_set_is_returned_and_put_back_by_the_context(rank: int) -> None:
    _, model, _ = models()
    assert types.get_state_dict_type(model).state_dict_type is SHARDED
    before = types.set_state_dict_type(model, FULL, FullStateDictConfig(rank0_only=True))
    assert before.state_dict_type is SHARDED
    with pytest.raises(KeyError), types.state_dict_type(model, LOCAL):
        raise KeyError
    now = types.get_state_dict_type(model)
    assert now.state_dict_type is FULL and now.state_dict_config == FullStateDictConfig(rank0_only=True)
    again = types.set_state_dict_type(model, before.state_dict_type, before.state_dict_config)
    assert again.state_dict_type is FULL
    assert type(model.state_dict()["head.bias"]) is ShardTensor


@ranks(2)
def test_a_deep_copy_gives_state_dicts_of_the_form_that_was_set(rank: int) -> None:
    plain, model, _ = models()
    types.set_state_dict_type(model, FULL, FullStateDictConfig(offload_to_cpu=True, rank0_only=True))
    twin = copy.deepcopy(model)
    found = twin.state_dict()
    if rank:
        assert not found
    else:
        same(found, plain)
    types.set_state_dict_type(twin, LOCAL)
    assert types.get_state_dict_type(model).state_dict_type is FULL


@ranks(2)
def test_the_optimizers_form_is_set_with_it(rank: int) -> None:
    _, model, _ = models()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with types.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        found = optim_state.optim_state_dict(model, optimizer)
        assert (found == {}) == (rank != 0)
    for form in (SHARDED, LOCAL):
        with types.state_dict_type(model, form):
            found = optim_state.optim_state_dict(model, optimizer)
            assert type(found["state"]["head.bias"]["exp_avg"]) is ShardTensor
    found = optim_state.optim_state_dict(model, optimizer)
    assert found["state"]["head.bias"]["exp_avg"].shape == model.head.bias.shape


@ranks(2)
def test_settings_that_do_not_go_together_are_refused(rank: int) -> None:
    plain, model, engine = models()
    with pytest.raises(ConfigError, match="form must be 'full' or 'sharded', not 'local'"):
        engine.state_dict(form="local")
    with pytest.raises(ConfigError, match="needs a FullStateDictConfig"):
        types.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(ConfigError, match="must be a StateDictType"):
        types.set_state_dict_type(model, "full")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not sharded"):
        types.get_state_dict_type(plain)


def test_state_in_another_dtype_or_in_a_list_is_loaded_onto_the_parameters_device():
    param = nn.Parameter(torch.empty(3, device="meta"))
    optimizer = torch.optim.SGD([param], lr=0.1)
    groups = optimizer.state_dict()["param_groups"]
    given = {
        "momentum": torch.ones(3, dtype=torch.bfloat16),
        "factors": [torch.ones(2)],
        "step": torch.tensor(2.0),
        "n": 3,
    }
    load_by_number(optimizer, {"state": {0: given}, "param_groups": groups})
    found = optimizer.state[param]
    assert found["momentum"].is_meta and found["momentum"].dtype is torch.bfloat16
    assert found["factors"][0].is_meta
    assert found["step"].item() == 2 and found["n"] == 3  # counters stay on the CPU, as torch has them
