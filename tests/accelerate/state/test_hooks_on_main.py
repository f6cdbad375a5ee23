"""Save hooks that write models on the main process alone, and load hooks that read them, as training scripts have them."""

from __future__ import annotations

import copy
import json
import os

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.accelerate.support.accelerators import (
    OURS,
    STOCK,
    Net,
    accelerator,
    full_parameters,
    loader,
    loss_of,
    net,
    sgd,
)
from tests.accelerate.support.checkpoints import plugin
from tests.accelerate.support.peft_models import adapted
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
from torch_shard.errors import ShardError, ShardPicklingError

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


def differ(found, wanted):
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]


def train(acc, model, optimizer, data):
    losses = []
    for batch in data:
        loss = loss_of(model, batch)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def idiom(kind, folder, **options):
    """Train, save, train on, load and train again with the hooks of diffusers' training scripts, unedited."""
    with accelerator(kind, **options) as accelerate:
        model = unet()
        model, optimizer, data = accelerate.prepare(model, sgd(model.parameters()), loader())

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
        losses = train(accelerate, model, optimizer, data)
        saved = full_parameters(accelerate.unwrap_model(model))
        accelerate.save_state(str(folder))
        accelerate.wait_for_everyone()
        losses += train(accelerate, model, optimizer, data)
        accelerate.load_state(str(folder))
        losses += train(accelerate, model, optimizer, data)
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


@ranks(2)
def test_a_hook_that_fails_on_the_main_process_leaves_models_as_they_were(rank, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(unet())

        def save(models, weights, folder):
            if acc.is_main_process:
                models[0].save_pretrained(os.path.join(folder, "unet"))
                raise KeyError("mine")

        handle = acc.register_save_state_pre_hook(save)
        with pytest.raises(KeyError if rank == 0 else ShardError, match="mine"):
            acc.save_state(tmp_path / "c")
        handle.remove()
        assert "state_dict" not in model.__dict__
        assert isinstance(model.state_dict()["net.head.weight"], ShardTensor)
        acc.save_state(tmp_path / "c")
        model.save_pretrained(tmp_path / "unet")  # collective again
        acc.load_state(tmp_path / "c")


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_hooks_for_lora_write_and_read_the_adapter_alone(form, tmp_path):
    """In the ways of diffusers' scripts (PEFT's functions) and of PEFT's own (save_pretrained)."""
    wanted = peft.get_peft_model_state_dict(adapted()[0])
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        model = acc.prepare(adapted()[0])

        def save(models, weights, folder):
            if acc.is_main_process:
                for model in models:
                    save_file(peft.get_peft_model_state_dict(acc.unwrap_model(model)), os.path.join(folder, "lora"))
                    acc.unwrap_model(model).save_pretrained(os.path.join(folder, "adapter"))
                    weights.pop()

        def load(models, folder):
            model = models.pop()
            found = peft.set_peft_model_state_dict(acc.unwrap_model(model), load_file(os.path.join(folder, "lora")))
            assert not found.unexpected_keys

        acc.register_save_state_pre_hook(save)
        acc.register_load_state_pre_hook(load)
        acc.save_state(tmp_path / "c")
        assert not differ(load_file(tmp_path / "c" / "lora"), wanted)
        assert not differ(load_file(tmp_path / "c" / "adapter" / "adapter_model.safetensors"), wanted)
        before = full_parameters(model)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.zero_()
        acc.load_state(tmp_path / "c")
        assert not differ(full_parameters(model), before)


@ranks(2)
def test_shards_of_the_given_weights_are_made_whole_by_save_pretrained_and_refused_by_torch_save(rank, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(adapted()[0])
        wanted = peft.get_peft_model_state_dict(adapted()[0])

        def save(models, weights, folder):
            if acc.is_main_process:
                models[0].save_pretrained(os.path.join(folder, "adapter"), state_dict=weights[0])
                with pytest.raises(ShardPicklingError, match=r"accelerator\.get_state_dict\(model\)"):
                    torch.save(weights[0], os.path.join(folder, "slices"))
                os.remove(os.path.join(folder, "slices"))

        acc.register_save_state_pre_hook(save)
        acc.save_state(tmp_path / "c")
        assert not differ(load_file(tmp_path / "c" / "adapter" / "adapter_model.safetensors"), wanted)
        acc.load_state(tmp_path / "c")
        del model


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
