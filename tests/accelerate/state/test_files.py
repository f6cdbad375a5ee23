"""What a checkpoint looks like on disk, what stays of the folder, and which ones are kept."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from accelerate_shard.models.unwrap import engine_of
from accelerate_shard.state.save import _Writing
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import Counter, Run, plugin
from tests.accelerate.support.models import loader, net, sgd
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.checkpoint.sharded import save as sharded_save
from torch_shard.errors import CheckpointError, ConfigError


def tree(folder):
    return sorted(os.path.relpath(path, folder) for path in Path(folder).rglob("*") if path.is_file())


def automatic(tmp_path, **options):
    return ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **options)


@pytest.mark.parametrize("safe", [True, *exhaustive(False)])
@ranks(2)
def test_the_full_form_has_the_files_of_stock_accelerate(rank, safe, tmp_path):
    for kind, name in ((STOCK, "stock"), (OURS, "ours")):
        with accelerator(kind, shard_plugin=plugin("full")) as acc:
            first = Run(acc)
            first.train(steps=1)
            acc.save_state(str(tmp_path / name), safe_serialization=safe)
            acc.wait_for_everyone()
    assert tree(tmp_path / "ours") == tree(tmp_path / "stock")
    wanted = torch.load(tmp_path / "stock" / "optimizer.bin")
    found = torch.load(tmp_path / "ours" / "optimizer.bin")
    assert found["param_groups"] == wanted["param_groups"]
    assert list(found["state"]) == list(wanted["state"])
    assert {n: list(s) for n, s in found["state"].items()} == {n: list(s) for n, s in wanted["state"].items()}


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_files_of_others_stay_and_files_of_the_checkpoint_before_go(rank, form, tmp_path):
    folder = tmp_path / "c"
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        acc.prepare(net(), sgd(net().parameters()))
        acc.register_for_checkpointing(Counter(), Counter())
        assert acc.save_state(folder) == folder
        both = {"custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "random_states_0.pkl", "random_states_1.pkl"}
        weights = {"sharded"} if form == "sharded" else {"model.safetensors", "optimizer.bin"}
        assert set(os.listdir(folder)) == both | weights
        acc.wait_for_everyone()
        if rank == 0:
            (folder / "args.json").write_text("{}")
            (folder / "logs" / "run").mkdir(parents=True)
            (folder / "logs" / "run" / "events").write_text("1")
        acc._custom_objects.pop()
        acc.wait_for_everyone()
        acc.save_state(folder)
        names = tree(folder)
        assert {"args.json", "logs/run/events", "custom_checkpoint_0.pkl"} <= set(names)
        assert "custom_checkpoint_1.pkl" not in names
        acc.load_state(folder)
    assert os.listdir(tmp_path) == ["c"]


@ranks(2)
def test_automatic_names_are_numbered_and_the_oldest_go_when_the_new_one_is_whole(rank, tmp_path):
    with accelerator(OURS, project_config=automatic(tmp_path, total_limit=2)) as acc:
        model = acc.prepare(net())
        for _ in range(3):
            acc.save_state()
        home = tmp_path / "checkpoints"
        assert sorted(os.listdir(home)) == ["checkpoint_1", "checkpoint_2"]
        assert acc.save_iteration == 3
        with torch.no_grad():
            model.head.bias.zero_()
        acc.load_state()  # the latest
        assert model.head.bias.to_local().any() or not model.head.bias.to_local().numel()

        def fail(models, weights, folder):
            raise OSError("no space left")

        handle = acc.register_save_state_pre_hook(fail)
        with pytest.raises(CheckpointError, match="no space left"):
            acc.save_state()
        handle.remove()
        acc.wait_for_everyone()
        assert sorted(os.listdir(home)) == ["checkpoint_1", "checkpoint_2"], "one went for a checkpoint that failed"
        assert acc.save_iteration == 3
        acc.project_configuration.iteration = 2
        with pytest.raises(ConfigError, match="already exists"):
            acc.save_state()
        with pytest.raises(ValueError, match="already exists"):  # as stock has it
            acc.save_state()


@ranks(2)
def test_automatic_names_go_on_after_checkpoints_of_the_main_process_alone(rank, tmp_path):
    with accelerator(OURS, project_config=automatic(tmp_path)) as acc:
        acc.prepare(net())
        if acc.is_main_process:
            acc.save_state()
            acc.save_state()
        acc.wait_for_everyone()
        for number in (2, 3):
            assert acc.save_state() == tmp_path / "checkpoints" / f"checkpoint_{number}"
            assert acc.save_iteration == number + 1
        assert sorted(os.listdir(tmp_path / "checkpoints")) == [f"checkpoint_{number}" for number in range(4)]


@ranks(2)
def test_an_asynchronous_checkpoint_is_in_its_place_when_the_next_call_returns(rank, tmp_path):
    project = automatic(tmp_path, total_limit=2)
    with accelerator(OURS, shard_plugin=plugin(async_save=True), project_config=project) as acc:
        first = Run(acc)
        for _ in range(3):
            first.train(steps=1)
            acc.save_state()
        wanted = first.state()
        first.train(steps=2)  # must not show in what is being written
        acc.load_state()
        found = first.state()
        assert all(torch.equal(found[name], value) for name, value in wanted.items() if torch.is_tensor(value))
        acc.save_state()
        objects = acc.free_memory(first.model)
        assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_2", "checkpoint_3"]
        del objects


@ranks(2)
def test_an_asynchronous_checkpoint_that_fails_is_raised_by_the_next_call_and_the_older_one_stays(rank, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(async_save=True)) as acc:
        model = acc.prepare(net())
        acc.save_state(tmp_path / "c")
        acc._finish_together("test")
        before = (tmp_path / "c" / "sharded" / "manifest.json").read_text()
        acc.save_state(tmp_path / "c")
        pending = acc._pending_state
        pending._ended.wait()
        pending._error = CheckpointError("the disk is full") if rank == 1 else None
        with pytest.raises(CheckpointError, match="the disk is full"):
            acc.save_state(tmp_path / "d")
        assert not (tmp_path / "d").exists()
        acc.save_state(tmp_path / "d")
        acc.load_state(tmp_path / "d")
        assert before != (tmp_path / "c" / "sharded" / "manifest.json").read_text()
        del model


@ranks(2)
def test_an_asynchronous_checkpoint_that_fails_is_not_put_in_place_where_its_error_has_been_raised_before(
    rank, tmp_path, monkeypatch
):
    with accelerator(OURS, shard_plugin=plugin(async_save=True)) as acc:
        model = acc.prepare(net())
        acc.save_state(tmp_path / "c")
        acc._finish_together("test")
        before = (tmp_path / "c" / "sharded" / "manifest.json").read_text()

        def fail(*_args):
            raise OSError("the disk is full")

        told, finish = threading.Event(), _Writing._finish
        monkeypatch.setattr(sharded_save._Save, "write", fail)
        monkeypatch.setattr(_Writing, "_finish", lambda writing, own: told.wait(30) and finish(writing, own))
        acc.save_state(tmp_path / "c")
        with pytest.raises(CheckpointError, match="the disk is full"):
            engine_of(model).finish_saving()
        told.set()
        with pytest.raises(CheckpointError, match="the disk is full"):
            acc.finish_saving()
        acc.wait_for_everyone()
        assert before == (tmp_path / "c" / "sharded" / "manifest.json").read_text()
        assert os.listdir(tmp_path) == ["c"]


@ranks(2)
def test_skipped_batches_and_steps_go_on_where_they_were(rank, tmp_path):
    with accelerator(OURS, gradient_accumulation_steps=2) as acc:
        model, data = acc.prepare(net(), loader())
        with acc.accumulate(model):
            acc.backward(model(next(iter(data))[0]).sum())
        assert acc.step == 1
        acc.save_state(tmp_path / "c")
        acc.step = 5
        acc.load_state(tmp_path / "c")
        assert acc.step == 1


@ranks(2)
def test_a_link_to_a_folder_stays_and_the_folder_is_written(rank, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        if rank == 0:
            (tmp_path / "disk").mkdir()
            (tmp_path / "disk" / "note").write_text("mine")
            (tmp_path / "last").symlink_to("disk")
        acc.wait_for_everyone()
        for _ in range(2):
            assert acc.save_state(tmp_path / "last") == tmp_path / "last"
            acc.save_model(model, tmp_path / "last")
            assert (tmp_path / "last").is_symlink()
            assert sorted(os.listdir(tmp_path)) == ["disk", "last"]
            assert {"note", "random_states_0.pkl", "model.safetensors"} <= set(os.listdir(tmp_path / "disk"))
        acc.load_state(tmp_path / "last")


@ranks(2)
def test_what_a_killed_save_has_left_goes_with_the_next_automatic_name(rank, tmp_path):
    home = tmp_path / "checkpoints"
    dead, foreign = (f".{name}.saving-{'0123456789abcdef'}" for name in ("checkpoint_4", "mine"))
    if rank == 0:
        for name in (dead, foreign):
            (home / name).mkdir(parents=True)
    with accelerator(OURS, project_config=automatic(tmp_path)) as acc:
        acc.prepare(net())
        acc.save_state()
        assert sorted(os.listdir(home)) == sorted([foreign, "checkpoint_0"])
        acc.wait_for_everyone()
