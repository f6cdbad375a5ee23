"""Hooks of ``save_state`` and ``load_state``, which may take models and weights away."""

from __future__ import annotations

import copy
import json
import os

import peft
import pytest
import torch
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_file, save_file
from torch import nn

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import differ, plugin
from tests.accelerate.support.models import Net, net, sgd
from tests.accelerate.support.peft_models import adapted
from tests.accelerate.support.training import full_parameters, prepared, steps
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ShardError, StateDictError


def two_models(acc, seed):
    """Two models, and an optimizer of the second."""
    one, two = net(seed), net(seed + 1)
    return acc.prepare(one, two, sgd(two.parameters()))


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@pytest.mark.parametrize("everything", [False, True])
@ranks(2)
def test_models_that_hooks_take_away_are_left_alone_and_all_else_is_saved_and_loaded(rank, everything, form, tmp_path):
    """Weights are taken on the main process only, as diffusers' training scripts do."""

    def take(entries):
        entries.clear() if everything else entries.pop()

    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        one, two, optimizer = two_models(acc, 0)
        acc.backward(two(torch.ones(2, 12)).sum())
        optimizer.step()
        wanted = full_parameters(one)
        acc.register_save_state_pre_hook(lambda models, weights, folder: rank or take(weights))
        acc.save_state(tmp_path / "c")
        momentum = optimizer.optimizer.state[two.head.weight]["momentum_buffer"].full_tensor()
        assert (tmp_path / "c" / "model.safetensors").is_file() == (form == "full" and not everything)
        assert not (tmp_path / "c" / "model_1.safetensors").exists()
    with accelerator(OURS) as acc:
        one, two, optimizer = two_models(acc, 5)
        acc.register_load_state_pre_hook(lambda models, folder: take(models))
        before = [full_parameters(one), full_parameters(two)]
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(one), before[0] if everything else wanted)
        assert not differ(full_parameters(two), before[1])
        assert torch.equal(optimizer.optimizer.state[two.head.weight]["momentum_buffer"].full_tensor(), momentum)


@ranks(2)
def test_a_hook_may_drop_entries_alike_on_all_ranks_and_is_refused_where_it_does_not(rank, tmp_path):
    def without_head(models, weights, folder):
        weights[0] = {name: value for name, value in weights[0].items() if "head" not in name}

    def renamed_on_the_first_only(models, weights, folder):
        if rank == 0:
            weights[0] = {f"own.{name}": value for name, value in weights[0].items()}

    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        handle = acc.register_save_state_pre_hook(without_head)
        acc.save_state(tmp_path / "c")
        handle.remove()
        with pytest.raises(StateDictError, match=r"missing: head\.weight, head\.bias"):
            acc.load_state(tmp_path / "c")
        before = full_parameters(model)
        acc.load_state(tmp_path / "c", strict=False)
        assert not differ(full_parameters(model), before)
        acc.register_save_state_pre_hook(renamed_on_the_first_only)
        with pytest.raises(StateDictError, match="a hook of save_state has left other weights"):
            acc.save_state(tmp_path / "d")
        acc.wait_for_everyone()
        assert os.listdir(tmp_path) == ["c"]


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
        relative = os.path.relpath(tmp_path / "c")
        acc.load_state(relative)
        plain = [acc.unwrap_model(one), acc.unwrap_model(two)]
        assert calls == [(plain, 2), (plain, str(tmp_path / "c")), (plain, relative)]


@pytest.mark.parametrize("kind", [STOCK, OURS])
@ranks(2)
def test_hooks_get_a_relative_name_of_an_automatic_checkpoint(kind, rank, tmp_path, monkeypatch):
    """The ranks have working directories of their own: one place by several paths."""
    (tmp_path / str(rank)).mkdir()
    monkeypatch.chdir(tmp_path / str(rank))
    calls, home = [], os.pardir
    with accelerator(kind, project_config=ProjectConfiguration(home, automatic_checkpoint_naming=True)) as acc:
        acc.prepare(net(0))
        acc.register_load_state_pre_hook(lambda models, folder: calls.append(folder))
        acc.save_state()
        acc.wait_for_everyone()
        acc.load_state()
        assert calls == [os.path.join(home, "checkpoints", "checkpoint_0")]


# -- hooks that write models on the main process alone, and read them, as training scripts have them ------------------
FILE = "diffusion_pytorch_model.safetensors"


class Unet(nn.Module):
    """What diffusers' ModelMixin does, with a model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.config = {"width": 16}

    def forward(self, x):
        return self.net(x)

    def register_to_config(self, **config):
        self.config = config

    def save_pretrained(self, save_directory, is_main_process=True, safe_serialization=True):
        os.makedirs(save_directory, exist_ok=True)
        if is_main_process:
            with open(os.path.join(save_directory, "config.json"), "w") as file:
                json.dump(self.config, file)
        save_file(self.state_dict(), os.path.join(save_directory, FILE), metadata={"format": "pt"})

    @classmethod
    def from_pretrained(cls, folder, subfolder=""):
        model = cls()
        model.load_state_dict(load_file(os.path.join(folder, subfolder, FILE)))
        return model


def unet(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Unet()


def idiom(kind, folder, **options):
    """Train, save, train on, load and train again with the hooks of diffusers' training scripts, unedited."""
    with accelerator(kind, **options) as accelerate:
        model, optimizer, data = prepared(accelerate, make=unet)

        def save_model_hook(models, weights, output_dir):
            if accelerate.is_main_process:
                for model in models:
                    accelerate.unwrap_model(model).save_pretrained(os.path.join(output_dir, "unet"))
                    weights.pop()

        def load_model_hook(models, input_dir):
            for _ in range(len(models)):
                model = models.pop()
                load_model = Unet.from_pretrained(input_dir, subfolder="unet")
                accelerate.unwrap_model(model).register_to_config(**load_model.config)
                accelerate.unwrap_model(model).load_state_dict(load_model.state_dict())
                del load_model

        accelerate.register_save_state_pre_hook(save_model_hook)
        accelerate.register_load_state_pre_hook(load_model_hook)
        losses = steps(accelerate, model, optimizer, data).losses
        saved = full_parameters(accelerate.unwrap_model(model))
        accelerate.save_state(str(folder))
        accelerate.wait_for_everyone()
        losses += steps(accelerate, model, optimizer, data).losses
        accelerate.load_state(str(folder))
        losses += steps(accelerate, model, optimizer, data).losses
        return losses, saved


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_the_hooks_of_diffusers_work_unedited(form, tmp_path):
    wanted, _ = idiom(STOCK, tmp_path / "stock")
    found, saved = idiom(OURS, tmp_path / "ours", shard_plugin=plugin(form))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    assert sorted(os.listdir(tmp_path / "ours" / "unet")) == ["config.json", FILE]
    assert not differ(load_file(tmp_path / "ours" / "unet" / FILE), saved)
    assert not (tmp_path / "ours" / "model.safetensors").exists()


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_on_the_main_process_every_way_to_a_models_weights_gives_full_ones(rank, form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        one, two = acc.prepare(unet(), net(3))
        wanted, other = full_parameters(one), full_parameters(two)

        def save(models, weights, folder):
            if acc.is_main_process:
                assert form == "sharded" or not differ(weights[0], wanted)
                inner = acc.unwrap_model(models[0])
                save_file(inner.state_dict(), os.path.join(folder, "own"))
                save_file(inner.net.state_dict(prefix="p."), os.path.join(folder, "part"))
                save_file(acc.get_state_dict(models[0]), os.path.join(folder, "asked"))
                acc.save_model(models[1], os.path.join(folder, "export"))
                torch.save(acc.get_state_dict(models[1]), os.path.join(folder, "two.bin"))

        acc.register_save_state_pre_hook(save)
        acc.save_state(tmp_path / "c")
        folder = tmp_path / "c"
        assert not differ(load_file(folder / "own"), wanted)
        assert not differ(load_file(folder / "part"), {name.replace("net.", "p."): t for name, t in wanted.items()})
        assert not differ(load_file(folder / "asked"), wanted)
        assert not differ(load_file(folder / "export" / "model.safetensors"), other)
        assert not differ(torch.load(folder / "two.bin"), other)
        # All of it only while hooks run.
        assert "state_dict" not in one.__dict__ and "state_dict" not in one.net.__dict__
        assert isinstance(one.state_dict()["net.head.weight"], ShardTensor)
        with torch.no_grad():
            one.net.head.weight.zero_()
        acc.load_state(tmp_path / "c")  # what hooks have left in the list is there, too
        assert not differ(full_parameters(one), wanted)


@ranks(2)
def test_hooks_that_save_on_all_ranks_work_too(rank, tmp_path):
    given = []
    with accelerator(OURS) as acc:
        model = acc.prepare(unet())
        wanted = full_parameters(model)

        def save(models, weights, folder):
            given.append(acc.get_state_dict(models[0]))
            acc.unwrap_model(models[0]).save_pretrained(
                os.path.join(folder, "unet"), is_main_process=acc.is_main_process
            )
            weights.pop()

        acc.register_save_state_pre_hook(save)
        acc.save_state(tmp_path / "c")
        assert not differ(load_file(tmp_path / "c" / "unet" / FILE), wanted)
        assert not (given[0] if rank else differ(given[0], wanted))


@pytest.mark.parametrize("failing", [0, 1])
@ranks(2)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all_and_leaves_models_and_files_as_they_were(
    rank, failing, tmp_path
):
    with accelerator(OURS) as acc:
        model = acc.prepare(unet())
        acc.save_state(tmp_path / "c")

        def save(models, weights, folder):
            if acc.is_main_process:
                models[0].save_pretrained(os.path.join(folder, "unet"))
            if rank == failing:
                raise KeyError("mine")

        handle = acc.register_save_state_pre_hook(save)
        with pytest.raises(KeyError if rank == failing else ShardError, match="mine"):
            acc.save_state(tmp_path / "c")
        handle.remove()
        acc.wait_for_everyone()
        assert os.listdir(tmp_path) == ["c"] and not (tmp_path / "c" / "unet").exists()
        assert "state_dict" not in model.__dict__
        assert isinstance(model.state_dict()["net.head.weight"], ShardTensor)
        acc.load_state(tmp_path / "c")
        model.save_pretrained(tmp_path / "unet")  # collective again


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_hooks_for_lora_write_and_read_the_adapter_alone(form, tmp_path):
    """In the ways of diffusers' scripts (PEFT's functions) and of PEFT's own (save_pretrained), which takes shards, too."""
    wanted = peft.get_peft_model_state_dict(adapted()[0])
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        model = acc.prepare(adapted()[0])

        def save(models, weights, folder):
            if acc.is_main_process:
                inner = acc.unwrap_model(models[0])
                save_file(peft.get_peft_model_state_dict(inner), os.path.join(folder, "lora"))
                inner.save_pretrained(os.path.join(folder, "adapter"))
                inner.save_pretrained(os.path.join(folder, "given"), state_dict=weights[0])
                torch.save(weights[0], os.path.join(folder, "by hand"))
                weights.pop()

        def load(models, folder):
            inner = acc.unwrap_model(models.pop())
            found = peft.set_peft_model_state_dict(inner, load_file(os.path.join(folder, "lora")))
            assert not found.unexpected_keys

        acc.register_save_state_pre_hook(save)
        acc.register_load_state_pre_hook(load)
        acc.save_state(tmp_path / "c")
        for name in ("lora", "adapter/adapter_model.safetensors", "given/adapter_model.safetensors"):
            assert not differ(load_file(tmp_path / "c" / name), wanted)
        by_hand = torch.load(tmp_path / "c" / "by hand")
        assert {type(value) for value in by_hand.values()} == {torch.Tensor}
        before = full_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0 if parameter.requires_grad else 1)
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(model), before)


@ranks(2)
def test_a_copy_that_a_hook_makes_has_a_state_dict_of_its_own(rank, tmp_path):
    with accelerator(OURS) as acc:
        acc.prepare(net())
        copies = []
        acc.register_save_state_pre_hook(lambda models, weights, folder: copies.append(copy.deepcopy(models[0])))
        acc.save_state(tmp_path / "c")
        with torch.no_grad():
            copies[0].head.bias.fill_(3.0)
        assert isinstance(copies[0].state_dict()["head.bias"], ShardTensor)
        assert torch.all(copies[0].state_dict()["head.bias"].full_tensor() == 3.0)
