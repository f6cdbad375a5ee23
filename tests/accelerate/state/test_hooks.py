"""Hooks of ``save_state`` and ``load_state``, which may take models and weights away."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, full_parameters, net, sgd
from tests.accelerate.support.checkpoints import plugin
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardError, StateDictError


def differ(found, wanted):
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_the_idiom_of_diffusers_saves_and_loads_models_its_own_way(rank, form, tmp_path):
    """Weights are popped on the main process only, and models are popped when loading, as its training scripts do."""

    def register(acc):
        def save(models, weights, folder):
            if acc.is_main_process:
                Path(folder, "config.json").write_text(json.dumps({"models": len(models)}))
                weights.pop()

        def load(models, folder):
            seen.append(json.loads(Path(folder, "config.json").read_text()))
            models.pop()

        acc.register_save_state_pre_hook(save)
        acc.register_load_state_pre_hook(load)

    seen = []
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        one, two = net(0), net(1)
        one, two, _ = acc.prepare(one, two, sgd(two.parameters()))
        register(acc)
        wanted = full_parameters(one)
        acc.save_state(tmp_path / "c")
        assert (tmp_path / "c" / "model.safetensors").is_file() == (form == "full")
        assert not (tmp_path / "c" / "model_1.safetensors").exists()
    with accelerator(OURS) as acc:
        one, two = net(5), net(6)
        one, two, _ = acc.prepare(one, two, sgd(two.parameters()))
        register(acc)
        untouched = full_parameters(two)
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(one), wanted)
        assert not differ(full_parameters(two), untouched)
        assert seen == [{"models": 2}]


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_hooks_that_take_everything_leave_the_optimizers(form, tmp_path):
    def build(seed):
        model = net(seed)
        return acc.prepare(model, sgd(model.parameters()))

    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        model, optimizer = build(0)
        acc.backward(model(torch.ones(2, 12)).sum())
        optimizer.step()
        wanted = full_parameters(model)
        acc.register_save_state_pre_hook(lambda models, weights, folder: weights.clear())
        acc.save_state(tmp_path / "c")
        momentum = optimizer.optimizer.state[model.head.weight]["momentum_buffer"].full_tensor()
    with accelerator(OURS) as acc:
        model, optimizer = build(3)
        before = full_parameters(model)
        acc.register_load_state_pre_hook(lambda models, folder: models.clear())
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(model), before)
        assert differ(before, wanted)
        assert torch.equal(optimizer.optimizer.state[model.head.weight]["momentum_buffer"].full_tensor(), momentum)


@ranks(2)
def test_in_the_full_form_hooks_see_full_weights_on_the_first_rank(rank, tmp_path):
    seen = []
    with accelerator(OURS, shard_plugin=plugin("full")) as acc:
        plain = net().state_dict()
        acc.prepare(net())
        acc.register_save_state_pre_hook(lambda models, weights, folder: seen.append(dict(weights[0])))
        acc.save_state(tmp_path / "c")
        assert rank or not differ(seen[0], plain)


@ranks(2)
def test_a_hook_may_drop_entries_alike_on_all_ranks_and_is_refused_where_it_does_not(rank, tmp_path):
    def without_head(weights):
        weights[0] = {name: value for name, value in weights[0].items() if "head" not in name}

    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        handle = acc.register_save_state_pre_hook(lambda models, weights, folder: without_head(weights))
        acc.save_state(tmp_path / "c")
        handle.remove()
        with pytest.raises(StateDictError, match=r"missing: head\.weight, head\.bias"):
            acc.load_state(tmp_path / "c")
        before = full_parameters(model)
        acc.load_state(tmp_path / "c", strict=False)
        assert not differ(full_parameters(model), before)

        def on_first_only(models, weights, folder):
            if rank == 0:
                weights[0] = {f"own.{name}": value for name, value in weights[0].items()}

        acc.register_save_state_pre_hook(on_first_only)
        with pytest.raises(StateDictError, match="a hook of save_state has left other weights"):
            acc.save_state(tmp_path / "d")
        acc.wait_for_everyone()
        assert os.listdir(tmp_path) == ["c"]


@ranks(2)
def test_a_hook_that_raises_on_one_rank_is_an_error_on_all_and_leaves_the_checkpoint_of_before(rank, tmp_path):
    def fail(models, weights, folder):
        if rank == 1:
            raise KeyError("mine")

    with accelerator(OURS) as acc:
        acc.prepare(net())
        acc.save_state(tmp_path / "c")
        handle = acc.register_save_state_pre_hook(fail)
        with pytest.raises(KeyError if rank == 1 else ShardError, match="mine"):
            acc.save_state(tmp_path / "c")
        handle.remove()
        acc.wait_for_everyone()
        assert os.listdir(tmp_path) == ["c"]
        acc.load_state(tmp_path / "c")


@pytest.mark.parametrize("kind", [STOCK, OURS])
@ranks(2)
def test_hooks_get_what_stock_accelerate_gives_them(kind, tmp_path):
    calls = []
    with accelerator(kind) as acc:
        one, two = acc.prepare(net(0), net(1))
        acc.register_save_state_pre_hook(lambda models, weights, folder: calls.append((list(models), len(weights))))
        acc.register_load_state_pre_hook(lambda models, folder: calls.append((list(models), folder)))
        acc.save_state(str(tmp_path / "c"))
        acc.wait_for_everyone()
        acc.load_state(str(tmp_path / "c"))
        plain = [acc.unwrap_model(one), acc.unwrap_model(two)]
        assert calls == [(plain, 2), (plain, str(tmp_path / "c"))]
