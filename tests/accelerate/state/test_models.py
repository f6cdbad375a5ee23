"""Any number of models and optimizers, and models by themselves."""

from __future__ import annotations

import json
import os

import pytest
import safetensors.torch
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file
from torch import nn

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import Noisy, differ, plugin
from tests.accelerate.support.models import loader, loss_of, net, sgd
from tests.accelerate.support.training import full_parameters
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ShardPicklingError


def several(acc, seed):
    """Two models and a parameter of none under one optimizer, a model that is only evaluated, and data."""
    one, two, teacher = net(seed), net(seed + 1), net(seed + 2).requires_grad_(False)
    scale = nn.Parameter(torch.full((3,), 1.0 + seed))
    optimizer = torch.optim.AdamW([*one.parameters(), scale, *two.parameters()], lr=0.05)
    acc.prepare_model(teacher, evaluation_mode=True)
    return *acc.prepare(one, two, optimizer, loader()), scale


@ranks(2)
def test_an_optimizer_over_several_models_goes_through_both_forms_unchanged(tmp_path):
    with accelerator(STOCK) as acc:
        one, two, optimizer, data, scale = several(acc, 0)
        for x, y in data:
            acc.backward(nn.functional.cross_entropy(one(x) + two(x), y) + scale.square().sum())
            optimizer.step()
            optimizer.zero_grad()
        acc.save_state(str(tmp_path / "stock"))
        acc.wait_for_everyone()
    with accelerator(OURS) as acc:
        several(acc, 3)
        acc.load_state(tmp_path / "stock")
        acc.save_state(tmp_path / "sharded")
    with accelerator(OURS, shard_plugin=plugin("full")) as acc:
        several(acc, 6)
        acc.load_state(tmp_path / "sharded")
        acc.save_state(tmp_path / "full")
    wanted, found = (torch.load(tmp_path / name / "optimizer.bin") for name in ("stock", "full"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for name in ("model.safetensors", "model_1.safetensors", "model_2.safetensors"):
        wanted, found = (load_file(tmp_path / folder / name) for folder in ("stock", "full"))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.exhaustive
@ranks(2)
def test_a_compiled_model_is_saved_under_its_plain_names(tmp_path):
    with accelerator(OURS, shard_plugin=plugin("full")) as acc:
        model = acc.prepare(net())
        wanted = full_parameters(model)
        compiled = torch.compile(model, backend="eager")
        acc._models[0] = compiled
        assert list(acc.get_state_dict(compiled, unwrap=False)) in ([f"_orig_mod.{name}" for name in wanted], [])
        assert list(acc.get_state_dict(compiled)) in (list(wanted), [])
        acc.save_state(tmp_path / "c")
    with accelerator(OURS) as acc:
        plain = acc.prepare(net(3))
        acc.load_state(tmp_path / "c")
        found = full_parameters(plain)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())


# -- models by themselves -----------------------------------------------------------------------------------------------
@ranks(2)
def test_the_state_dict_is_whole_on_the_first_rank_and_empty_elsewhere(rank):
    with accelerator(OURS) as acc:
        plain = net().state_dict()
        found = acc.get_state_dict(acc.prepare(net()))
        assert list(found) == ([] if rank else list(plain))
        assert all(torch.equal(value, plain[name]) and value.device.type == "cpu" for name, value in found.items())
        aside = nn.Linear(2, 2)
        assert acc.get_state_dict(aside).keys() == aside.state_dict().keys()


@pytest.mark.parametrize("safe", [True, False])
@ranks(2)
def test_a_saved_model_is_loaded_by_stock_accelerate_whole_and_in_several_files(rank, safe, tmp_path):
    folder = tmp_path / "m"
    with accelerator(OURS) as acc:
        torch.manual_seed(0)
        wanted = Noisy()
        torch.manual_seed(0)
        model = acc.prepare(Noisy())
        for size in ("1KB", "10GB", "2KB"):
            if rank == 0:
                (folder / "logs").mkdir(parents=True, exist_ok=True)
            acc.save_model(model, folder, max_shard_size=size, safe_serialization=safe)
            acc.wait_for_everyone()
            names = sorted(name for name in os.listdir(folder) if name != "logs")
            if size == "10GB":
                assert [name for name in names if "-of-" in name or "index" in name] == []
            else:
                index = next(name for name in names if name.endswith(".index.json"))
                listed = set(json.loads((folder / index).read_text())["weight_map"].values())
                assert listed == {name for name in names if "-of-" in name}
                assert len(listed) > 1
            fresh = Noisy()
            load_checkpoint_in_model(fresh, str(folder))
            assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in wanted.state_dict().items())
            acc.wait_for_everyone()
    assert (folder / "logs").is_dir()


@pytest.mark.parametrize("safe", [True, *exhaustive(False)])
@ranks(2)
def test_a_part_of_a_model_is_saved_by_itself_on_all_ranks_and_on_the_main_process_alone(safe, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(Noisy())
        wanted = acc.get_state_dict(model)
        acc.save_model(model.layers, tmp_path / "all", max_shard_size="1KB", safe_serialization=safe)
        if acc.is_main_process:
            acc.save_model(model.layers, tmp_path / "alone", safe_serialization=safe)
            for folder in ("all", "alone"):
                fresh = Noisy().layers
                load_checkpoint_in_model(fresh, str(tmp_path / folder))
                assert all(torch.equal(value, wanted[f"layers.{k}"]) for k, value in fresh.state_dict().items())
        acc.wait_for_everyone()
        found = acc.get_state_dict(model.head)
        assert all(torch.equal(value, wanted[f"head.{name}"]) for name, value in found.items())
        assert len(found) == (2 if acc.is_main_process else 0)


@ranks(2)
def test_safetensors_functions_write_full_parameters_on_the_main_process_alone(tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        wanted = acc.get_state_dict(model)
        if acc.is_main_process:
            safetensors.torch.save_file(model.state_dict(), tmp_path / "file", metadata={"format": "pt"})
            assert not differ(load_file(tmp_path / "file"), wanted)
            assert not differ(safetensors.torch.load(safetensors.torch.save(model.state_dict())), wanted)
            model.head.weight.grad = torch.ones(model.head.weight.shape)
            with pytest.raises(ShardPicklingError):
                safetensors.torch.save({"gradient": model.head.weight.grad})
        acc.wait_for_everyone()


@ranks(2)
def test_safetensors_functions_save_and_load_a_model_with_tied_weights(tmp_path):
    with accelerator(OURS) as acc:
        model, other = acc.prepare(Noisy(), Noisy())
        wanted = acc.get_state_dict(model)
        if acc.is_main_process:
            safetensors.torch.save_model(model, tmp_path / "alone")
        safetensors.torch.save_model(model, tmp_path / f"rank {acc.process_index}")
        acc.wait_for_everyone()
        for name in ("alone", "rank 0", "rank 1") if acc.is_main_process else ():
            plain = Noisy()
            assert safetensors.torch.load_model(plain, tmp_path / name) == (set(), [])
            assert not differ(plain.state_dict(), wanted)
        assert safetensors.torch.load_model(other, tmp_path / "alone") == (set(), [])
        assert not differ(acc.get_state_dict(other), wanted)


@pytest.mark.exhaustive
@pytest.mark.parametrize("safe", [False, True])
@ranks(2)
def test_save_writes_full_parameters_and_plain_modules(safe, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        for part in () if safe else (model, model.head):
            acc.save(part, tmp_path / "part")
            if acc.is_main_process:
                loaded = torch.load(tmp_path / "part", weights_only=False)
                assert type(loaded) is type(part) and not any(isinstance(p, ShardTensor) for p in loaded.parameters())
                torch.save(part.state_dict(), tmp_path / "part")
                assert not differ(loaded.state_dict(), torch.load(tmp_path / "part"))
            acc.wait_for_everyone()
        acc.save(model.state_dict(), tmp_path / "shards", safe_serialization=safe)
        acc.save(acc.get_state_dict(model), tmp_path / "full", safe_serialization=safe)
        acc.wait_for_everyone()
        found = [(load_file if safe else torch.load)(tmp_path / name) for name in ("shards", "full")]
        assert not differ(*found)


@pytest.mark.parametrize("safe", [False, True])
@ranks(2)
def test_save_writes_tied_weights_once_and_the_versions_of_modules(safe, tmp_path):
    tied = [f"layers.{number}.linear.weight" for number in (0, 1)]
    with accelerator(OURS) as acc:
        model = acc.prepare(Noisy())
        acc.save(model.state_dict(), tmp_path / "state", safe_serialization=safe)
        if not safe:
            acc.save({"model": model.state_dict()}, tmp_path / "nested")
        acc.wait_for_everyone()
        if safe:
            assert [name in load_file(tmp_path / "state") for name in tied] == [True, False]
            safetensors.torch.load_model(Noisy(), tmp_path / "state")
        for found in () if safe else (torch.load(tmp_path / "state"), torch.load(tmp_path / "nested")["model"]):
            assert found[tied[0]].data_ptr() == found[tied[1]].data_ptr()
            assert found._metadata == Noisy().state_dict()._metadata


@ranks(2)
def test_safetensors_refuses_tied_weights_of_a_state_dict_as_under_ddp(tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(Noisy())
        if acc.is_main_process:
            with pytest.raises(RuntimeError, match="share memory"):
                safetensors.torch.save_file(model.state_dict(), tmp_path / "file")
        acc.wait_for_everyone()


@pytest.mark.parametrize("error", [KeyboardInterrupt, *exhaustive(ZeroDivisionError)])
@ranks(2)
def test_the_script_saves_when_a_step_has_failed_as_under_ddp(rank, error, tmp_path):
    found = []
    for kind in (STOCK, OURS):
        with accelerator(kind) as acc:
            model, data = acc.prepare(net(), loader())
            optimizer = acc.prepare(sgd(model.parameters()))
            try:
                for step, batch in enumerate(data):
                    acc.backward(loss_of(model, batch))
                    if step == 2:
                        raise error
                    optimizer.step()
                    optimizer.zero_grad()
            except error:
                if acc.is_main_process:
                    torch.save(acc.unwrap_model(model).state_dict(), tmp_path / "alone")
                    found.append(torch.load(tmp_path / "alone"))
                acc.wait_for_everyone()
                acc.save(acc.unwrap_model(model).state_dict(), tmp_path / "all")
                acc.wait_for_everyone()
                found.append(torch.load(tmp_path / "all"))
    half = len(found) // 2
    assert half == 2 - rank
    torch.testing.assert_close(found[half:], found[:half])
