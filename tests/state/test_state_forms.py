"""State dicts in every form, by the engine's own methods and by those that code for torch's FSDP uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_shard
from tests.support.odd_model import Net, batch, build
from tests.support.ranks import ranks
from torch_shard import ShardTensor, optim_state
from torch_shard import state_dict_type as types
from torch_shard.errors import ConfigError, ShardError, StateDictError
from torch_shard.state_dict_type import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
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


def zero(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()


@ranks(2, exhaustive=(1, 3))
def test_the_sharded_form_is_of_global_shape_and_shares_memory(rank: int) -> None:
    plain, model, engine = models()
    found = engine.state_dict(form="sharded")
    wanted = plain.state_dict()
    assert list(found) == list(wanted)
    for name, p in model.named_parameters():
        assert type(found[name]) is ShardTensor and found[name].shape == wanted[name].shape
        assert found[name].to_local().data_ptr() == p.to_local().data_ptr()
        assert torch.equal(found[name].full_tensor(), wanted[name])


@pytest.mark.parametrize("form", ["sharded", "local"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2, exhaustive=(1, 3))
def test_slices_go_back_where_they_came_from(rank: int, strategy: str, form: str) -> None:
    plain, model, engine = models(strategy=strategy)
    kept = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in engine.state_dict(form=form).items()}
    zero(model)
    engine.load_state_dict(kept, form=form)
    same(engine.state_dict(rank0_only=False), plain)


@ranks(2)
def test_local_slices_of_another_cut_are_refused_on_all_ranks(rank: int) -> None:
    plain, model, engine = models()
    wrong = engine.state_dict(form="local")
    if rank == 1:
        name = next(n for n, p in model.named_parameters() if p.to_local().numel())
        wrong[name] = wrong[name][1:]
    with pytest.raises(StateDictError, match="same number of ranks"):
        engine.load_state_dict(wrong, form="local")
    same(engine.state_dict(rank0_only=False), plain)
    for call in (lambda: engine.state_dict(form="flat"), lambda: engine.load_state_dict({}, form="flat")):
        with pytest.raises(ConfigError, match="form must be"):
            call()


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
def test_full_works_below_another_module_too(rank: int) -> None:
    plain, model, _ = models()
    outer, reference = torch.nn.ModuleDict({"net": model}), torch.nn.ModuleDict({"net": plain})
    with types.state_dict_type(model, FULL):
        same(outer.state_dict(), reference)


@ranks(2)
def test_local_and_sharded_can_be_set(rank: int) -> None:
    _, model, _ = models()
    with types.state_dict_type(model, LOCAL, LocalStateDictConfig()):
        for name, p in model.named_parameters():
            found = model.state_dict()[name]
            assert type(found) is torch.Tensor and torch.equal(found, p.to_local())
        with types.state_dict_type(model, SHARDED, ShardedStateDictConfig(offload_to_cpu=True)):
            assert type(model.state_dict()["head.bias"]) is ShardTensor
        assert types.get_state_dict_type(model).state_dict_type is LOCAL


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
def test_the_optimizers_form_is_set_with_it(rank: int) -> None:
    _, model, _ = models()
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    with types.state_dict_type(model, FULL, None, FullOptimStateDictConfig(rank0_only=True)):
        found = optim_state.optim_state_dict(model, optimizer)
        assert (found == {}) == (rank != 0)
    with types.state_dict_type(model, SHARDED):
        found = optim_state.optim_state_dict(model, optimizer)
        assert type(found["state"]["head.bias"]["exp_avg"]) is ShardTensor
    with types.state_dict_type(model, LOCAL), pytest.raises(ConfigError, match="LOCAL_STATE_DICT is for models"):
        optim_state.optim_state_dict(model, optimizer)
    found = optim_state.optim_state_dict(model, optimizer)
    assert found["state"]["head.bias"]["exp_avg"].shape == model.head.bias.shape


@ranks(2)
def test_settings_that_do_not_go_together_are_refused(rank: int) -> None:
    plain, model, _ = models()
    with pytest.raises(ConfigError, match="needs a FullStateDictConfig"):
        types.set_state_dict_type(model, FULL, ShardedStateDictConfig())
    with pytest.raises(ConfigError, match="must be a StateDictType"):
        types.set_state_dict_type(model, "full")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not sharded"):
        types.get_state_dict_type(plain)


@ranks(2)
def test_a_full_state_dict_on_one_rank_only_is_an_error_on_all(rank: int) -> None:
    _, model, _ = models(timeout=5.0)
    with types.state_dict_type(model, FULL), pytest.raises(ShardError):
        if rank == 0:
            model.state_dict()
        else:
            model(batch(rank)).sum().backward()
