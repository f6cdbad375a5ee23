"""Any number of models and optimizers, and models by themselves."""

from __future__ import annotations

import json
import os

import pytest
import torch
from accelerate import load_checkpoint_in_model
from safetensors.torch import load_file
from torch import nn

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, full_parameters, loader, loss_of, net, sgd
from tests.accelerate.support.checkpoints import Noisy, plugin
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardPicklingError

FORMS = ["sharded", *exhaustive("full")]


def adam(params):
    return torch.optim.AdamW(params, lr=0.05)


def copied(state):
    return {name: value.clone() for name, value in state.items()}


class Pair:
    """A model and a parameter of no model under one optimizer, two models with their own, one that is only evaluated."""

    def __init__(self, acc, seed):
        self.acc = acc
        one, two, three = net(seed), net(seed + 1), net(seed + 2)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.rand(3))
            other = nn.Linear(2, 2)
        mixed, second = adam([*one.parameters(), self.scale]), adam(two.parameters())
        own, others = sgd(three.parameters()), adam(other.parameters())
        teacher = net(seed + 3).requires_grad_(False)
        self.other = other
        self.models = list(acc.prepare(one, two, three))
        self.optimizers = list(acc.prepare(mixed, second, own, others))
        self.teacher = acc.prepare_model(teacher, evaluation_mode=True)
        self.data = acc.prepare(loader())

    def train(self, steps=3):
        found = []
        for _, (x, y) in zip(range(steps), self.data, strict=False):
            one, two, three = self.models
            loss = nn.functional.cross_entropy(one(x) + two(x), y) + loss_of(three, (x, y))
            loss = loss + (three(x) - self.teacher(x)).square().mean()
            # What is not prepared is not averaged over the ranks either.
            loss = loss + self.scale.square().sum() + self.other(torch.ones(2)).square().sum()
            self.acc.backward(loss)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    def state(self):
        found = [full_parameters(model) for model in (*self.models, self.teacher)]
        return [*found, {"scale": self.scale.detach().clone(), **copied(self.other.state_dict())}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_several_models_and_optimizers_that_share_them_resume(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        first = Pair(acc, 0)
        first.train()
        acc.save_state(tmp_path / "c")
        stray = first.state()[-1]  # as under stock Accelerate, of these only the optimizer's state is saved
        wanted = first.train()
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        again = Pair(acc, 50)
        again.train(1)
        acc.load_state(tmp_path / "c")
        with torch.no_grad():
            again.scale.copy_(stray.pop("scale"))
            again.other.load_state_dict(stray)
        assert again.train() == wanted


def both(acc, seed):
    one, two = net(seed), net(seed + 1)
    return acc.prepare(one, two, adam([*one.parameters(), *two.parameters()]), loader())


@ranks(2)
def test_an_optimizer_over_two_models_goes_through_both_forms_unchanged(tmp_path):
    with accelerator(STOCK) as acc:
        one, two, optimizer, data = both(acc, 0)
        for x, y in data:
            acc.backward(nn.functional.cross_entropy(one(x) + two(x), y))
            optimizer.step()
            optimizer.zero_grad()
        acc.save_state(str(tmp_path / "stock"))
        acc.wait_for_everyone()
    with accelerator(OURS) as acc:
        both(acc, 3)
        acc.load_state(tmp_path / "stock")
        acc.save_state(tmp_path / "sharded")
    with accelerator(OURS, shard_plugin=plugin("full")) as acc:
        both(acc, 6)
        acc.load_state(tmp_path / "sharded")
        acc.save_state(tmp_path / "full")
    wanted, found = (torch.load(tmp_path / name / "optimizer.bin") for name in ("stock", "full"))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    for name in ("model.safetensors", "model_1.safetensors"):
        wanted, found = (load_file(tmp_path / folder / name) for folder in ("stock", "full"))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", FORMS)
@ranks(2)
def test_a_compiled_model_is_saved_under_its_plain_names(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
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


@ranks(2)
def test_a_model_of_transformers_with_tied_weights_is_saved_as_it_reads_it(rank, tmp_path):
    from tests.support.hf_models import build

    with accelerator(OURS) as acc:
        model, _, _ = build("gpt2", 0)
        config = model.config
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        model = acc.prepare(model)
        acc.save_model(model, tmp_path / "m")
        if rank == 0:
            config.save_pretrained(tmp_path / "m")
            found = type(model).from_pretrained(tmp_path / "m").state_dict()
            assert all(torch.equal(found[name], value) for name, value in wanted.items())
        acc.wait_for_everyone()


@pytest.mark.exhaustive
@pytest.mark.parametrize("safe", [False, True])
@ranks(2)
def test_shards_are_not_saved_on_any_rank_and_leave_no_file(rank, safe, tmp_path):
    with accelerator(OURS) as acc:
        model = net()
        model, optimizer, data = acc.prepare(model, torch.optim.Adam(model.parameters()), loader())
        acc.backward(loss_of(model, next(iter(data))))
        optimizer.step()
        plain = acc.unwrap_model(model)
        objects = [plain.state_dict(), {"epoch": 1, "state": [optimizer.state_dict()]}, plain, plain.head]
        for number, found in enumerate(objects[: 1 if safe else None]):
            with pytest.raises(ShardPicklingError):
                acc.save(found, tmp_path / f"{number}", safe_serialization=safe)
        assert not list(tmp_path.iterdir())
        whole = acc.get_state_dict(model)
        acc.save(whole, tmp_path / "whole", safe_serialization=safe)
        acc.wait_for_everyone()
        assert [file.name for file in tmp_path.iterdir()] == ["whole"]
        acc.wait_for_everyone()
        acc.register_save_state_pre_hook(
            lambda models, weights, folder: acc.save(models[0].state_dict(), f"{folder}/hook", safe_serialization=safe)
        )
        acc.save_state(tmp_path / "state")
        assert (tmp_path / "state" / "hook").stat().st_size > 1000
