"""A training that is resumed equals one that was not interrupted."""

from __future__ import annotations

import pytest
import torch

from tests.accelerate.helpers import OURS, STOCK, accelerator
from tests.accelerate.state.helpers import Run, plugin
from tests.marks import exhaustive
from tests.ranks import ranks, run


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert equal, f"{name}: {found[name]} is not {value}"


@pytest.mark.parametrize("form", ["sharded", "full"])
@ranks(2)
def test_resume_in_the_middle_of_an_epoch_equals_a_training_without_interruption(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        whole = Run(acc)
        whole.train(steps=2)
        acc.save_state(tmp_path / "c")
        rest = whole.train(skip=2)
        wanted = whole.state()
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        again = Run(acc, seed=7)
        acc.load_state(tmp_path / "c")
        assert again.train(skip=2) == rest
        same(again.state(), wanted)


@pytest.mark.parametrize(("writes", "reads"), [("sharded", "full"), ("full", "sharded")])
@ranks(2)
def test_both_forms_are_loaded_whatever_the_setting(writes, reads, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(writes)) as acc:
        first = Run(acc)
        first.train()
        acc.save_state(tmp_path / "c")
        wanted = first.state()
    with accelerator(OURS, shard_plugin=plugin(reads)) as acc:
        again = Run(acc, seed=7)
        again.train(steps=1)
        acc.load_state(tmp_path / "c")
        same(again.state(), wanted)


@pytest.mark.parametrize(("writer", "reader"), [(STOCK, OURS), (OURS, STOCK)])
@ranks(2)
def test_checkpoints_go_to_stock_accelerate_and_come_from_it(writer, reader, tmp_path):
    with accelerator(writer, shard_plugin=plugin("full")) as acc:
        first = Run(acc)
        first.train(steps=2)
        acc.save_state(str(tmp_path / "c"))
        rest = first.train(skip=2)
    with accelerator(reader, shard_plugin=plugin("full")) as acc:
        again = Run(acc, seed=7)
        acc.load_state(str(tmp_path / "c"))
        torch.testing.assert_close(again.train(skip=2), rest, rtol=1e-5, atol=0)


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


@pytest.mark.parametrize(("form", "other"), [("sharded", 1), *exhaustive(("sharded", 3), ("full", 3), ("full", 1))])
def test_another_number_of_ranks_resumes(form, other, tmp_path):
    wanted = run(2, save, str(tmp_path / "c"), form)[0]
    run(other, load, str(tmp_path / "c"), wanted)
