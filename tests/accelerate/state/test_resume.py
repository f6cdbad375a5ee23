"""A training that is resumed equals one that was not interrupted."""

from __future__ import annotations

import pytest
import torch

from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import Run, plugin
from tests.accelerate.support.models import net
from tests.accelerate.support.training import full_parameters
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard.errors import CheckpointError, StateDictError


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert equal, f"{name}: {found[name]} is not {value}"


@pytest.mark.exhaustive
@pytest.mark.parametrize(("form", "offload"), [("sharded", None), ("sharded", "cpu"), *exhaustive(("full", None))])
@ranks(2)
def test_resume_in_the_middle_of_an_epoch_equals_a_training_without_interruption(form, offload, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form, offload=offload)) as acc:
        whole = Run(acc)
        whole.train(steps=2)
        acc.save_state(tmp_path / "c")
        rest = whole.train(skip=2)
        wanted = whole.state()
    with accelerator(OURS, shard_plugin=plugin(form, offload=offload)) as acc:
        again = Run(acc, seed=7)
        acc.load_state(tmp_path / "c")
        assert again.train(skip=2) == rest
        same(again.state(), wanted)


@pytest.mark.parametrize(
    ("writer", "writes", "reader", "reads"),
    [
        (OURS, "sharded", OURS, "full"),
        (STOCK, "full", OURS, "sharded"),
        (OURS, "full", STOCK, "full"),
        *exhaustive((OURS, "full", OURS, "sharded")),
    ],
)
@ranks(2)
def test_both_forms_are_loaded_whatever_the_setting_and_the_full_one_by_stock_accelerate(
    writer, writes, reader, reads, tmp_path
):
    with accelerator(writer, shard_plugin=plugin(writes)) as acc:
        first = Run(acc)
        first.train(steps=2)
        acc.save_state(str(tmp_path / "c"))
        rest = first.train(skip=2)
    with accelerator(reader, shard_plugin=plugin(reads)) as acc:
        again = Run(acc, seed=7)
        again.train(steps=1)
        acc.load_state(str(tmp_path / "c"))
        torch.testing.assert_close(again.train(skip=2), rest, rtol=0 if writer is reader else 1e-5, atol=0)


def save(rank, world_size, folder, form):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        first = Run(acc, size=48)
        first.train(steps=2)
        acc.save_state(folder)
        return first.state()


def load(rank, world_size, folder, wanted):
    with accelerator(OURS) as acc:
        again = Run(acc, seed=7, size=48)
        acc.load_state(folder)
        same(again.state(), wanted)
        again.train(steps=1)


@pytest.mark.parametrize(("form", "other"), [("sharded", 1), *exhaustive(("sharded", 3), ("full", 3))])
def test_another_number_of_ranks_resumes(form, other, tmp_path):
    wanted = run(2, save, str(tmp_path / "c"), form)[0]
    run(other, load, str(tmp_path / "c"), wanted)


class Average:
    """A moving average of parameters, of the same kind as they are."""

    def __init__(self, model):
        self.values = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def follow(self, model):
        for value, p in zip(self.values, model.parameters(), strict=True):
            value.lerp_(p, 0.5)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


@pytest.mark.parametrize(("writer", "reader"), [(OURS, OURS), *exhaustive((OURS, STOCK), (STOCK, OURS))])
@ranks(2)
def test_averages_of_parameters_are_saved_whole_and_loaded_as_shards(writer, reader, tmp_path):
    def prepared(acc, seed):
        model = acc.unwrap_model(acc.prepare(net(seed)))
        average = Average(model)
        acc.register_for_checkpointing(average)
        return model, average

    with accelerator(writer, shard_plugin=plugin("full")) as acc:
        model, average = prepared(acc, 0)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(2)
        average.follow(model)
        acc.save_state(str(tmp_path / "c"))
        acc.wait_for_everyone()
    with accelerator(reader) as acc:
        model, average = prepared(acc, 3)
        acc.load_state(str(tmp_path / "c"))
        whole = [v.full_tensor() if hasattr(v, "full_tensor") else v for v in average.values]
        assert all(map(torch.equal, whole, [1.5 * p for p in net(0).parameters()]))
        average.follow(model)  # slices and slices, or whole and whole


@ranks(2)
def test_a_scaler_is_saved_and_loaded(tmp_path):
    with accelerator(OURS) as acc:
        acc.prepare(net())
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        acc.save_state(tmp_path / "c")
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        acc.load_state(tmp_path / "c")
        assert acc.scaler.state_dict()["scale"] == 8.0
        acc.scaler = None
        acc.save_state(tmp_path / "d")
        acc.scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(CheckpointError, match=r"scaler\.pt"):
            acc.load_state(tmp_path / "d")


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_weights_of_another_dtype_are_converted_where_that_is_asked_for(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        acc.prepare(net(0))
        acc.save_state(tmp_path / "c")
    with accelerator(OURS) as acc:
        model = acc.prepare(net(3).bfloat16())
        with pytest.raises(StateDictError, match=r"pass dtype=torch\.bfloat16"):
            acc.load_state(tmp_path / "c")
        acc.load_state(tmp_path / "c", dtype=torch.bfloat16)
        found = full_parameters(model)
        assert all(torch.equal(found[name], p.bfloat16()) for name, p in net(0).named_parameters())
