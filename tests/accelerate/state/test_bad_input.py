"""What can't be saved or loaded is an error on all ranks, and changes nothing."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, engine_of, full_parameters, net, sgd
from tests.accelerate.support.checkpoints import Counter, Noisy, Run, plugin
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import (
    CheckpointError,
    ConfigError,
    DivergenceError,
    MissingRankError,
    ShardError,
    StateDictError,
    UnitStateError,
)

CALLS = ["save_state", "get_state_dict", "save_model", "load_state"]


def call(acc, what, model, folder):
    return {
        "save_state": lambda: acc.save_state(folder),
        "get_state_dict": lambda: acc.get_state_dict(model),
        "save_model": lambda: acc.save_model(model, folder),
        "load_state": lambda: acc.load_state(folder),
    }[what]()


def listed(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


@pytest.mark.parametrize("what", quick(CALLS, ["save_state", "load_state"]))
@ranks(2)
def test_a_call_on_the_main_process_only_is_reported_when_the_others_go_on_training(rank, what, tmp_path):
    folder = tmp_path / "c"
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        acc.save_state(folder)
        before = listed(tmp_path)
        with pytest.raises(DivergenceError, match=f"rank 0: Accelerator.{what}.*rank 1: begins a forward"):
            if acc.is_main_process:
                call(acc, what, model, folder)
            else:
                model(torch.ones(2, 12))
        assert listed(tmp_path) == before


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_save_on_the_main_process_only_is_reported_in_time_and_leaves_the_checkpoint_of_before(rank, tmp_path):
    folder = tmp_path / "c"
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        acc.save_state(folder)
        before = listed(folder)
        dist.barrier()
        engine_of(model)._runtime.collectives.watchdog.timeout = 1.0  # set-up may take longer
        began = time.monotonic()
        if acc.is_main_process:
            with pytest.raises(MissingRankError, match=r"Accelerator\.save_state(.|\n)*rank 1"):
                acc.save_state(folder)
            assert listed(folder) == before
            (tmp_path / "done").touch()
        else:
            while not (tmp_path / "done").exists() and time.monotonic() < began + 20:
                time.sleep(0.05)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "done"]


def damage(folder: Path, what: str) -> None:
    if what == "missing part":
        next(path for path in (folder / "sharded").iterdir() if path.name.startswith("__1")).unlink()
    elif what == "flipped bit":
        path = next(path for path in (folder / "sharded").iterdir() if path.name.startswith("__1"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    elif what == "no scheduler":
        (folder / "scheduler.bin").unlink()
    elif what == "cut scheduler":
        os.truncate(folder / "scheduler.bin", 100)
    elif what == "no custom object":
        (folder / "custom_checkpoint_0.pkl").unlink()
    elif what == "cut random states":
        os.truncate(folder / "random_states_1.pkl", 100)
    elif what == "no optimizer":
        (folder / "optimizer.bin").unlink()
    elif what == "cut optimizer":
        os.truncate(folder / "optimizer.bin", 500)
    elif what == "no model":
        (folder / "model.safetensors").unlink()
    elif what == "cut model":
        os.truncate(folder / "model.safetensors", 900)


DAMAGES = {
    "sharded": [
        "missing part",
        "flipped bit",
        "no scheduler",
        "cut scheduler",
        "no custom object",
        "cut random states",
    ],
    "full": ["no optimizer", "cut optimizer", "no model", "cut model"],
}


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_a_checkpoint_that_is_damaged_or_incomplete_is_refused_and_nothing_changes(rank, form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        first = Run(acc)
        first.train(steps=1)
        for number, what in enumerate(DAMAGES[form]):
            folder = tmp_path / str(number)
            acc.save_state(folder)
            if rank == 0:
                damage(folder, what)
            acc.wait_for_everyone()
            first.train(steps=1)
            before, random = first.state(), torch.get_rng_state()
            with pytest.raises(CheckpointError):
                acc.load_state(folder)
            after = first.state()
            assert all(str(after[name]) == str(value) for name, value in before.items()), what
            assert torch.equal(torch.get_rng_state(), random), what
        first.train(steps=1)


class Other(Noisy):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(3, 3)
        del self.head
        self.tail = nn.Linear(16, 5)


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_a_checkpoint_of_another_model_is_refused_with_everything_that_does_not_fit(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        model = net(0)
        acc.prepare(model, sgd(model.parameters()), net(1))
        acc.save_state(tmp_path / "c")
    with accelerator(OURS) as acc:
        model = net(2)
        model, _, other = acc.prepare(model, sgd(model.parameters()), Other())
        before = [full_parameters(model), full_parameters(other)]
        with pytest.raises(StateDictError) as caught:
            acc.load_state(tmp_path / "c")
        text = str(caught.value)
        assert "nothing was loaded" in text
        for name in ("extra.weight", "extra.bias", "tail.weight", "tail.bias", "head.weight", "head.bias"):
            assert name in text, text
        after = [full_parameters(model), full_parameters(other)]
        assert str(before) == str(after)


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_another_optimizer_is_refused(form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        model = net(0)
        acc.prepare(model, sgd(model.parameters()))
        acc.save_state(tmp_path / "c")
    with accelerator(OURS) as acc:
        model = net(2)
        parts = [{"params": model.embed.parameters()}, {"params": model.head.parameters()}]
        model, _ = acc.prepare(model, sgd(parts))
        before = full_parameters(model)
        with pytest.raises(StateDictError, match="groups"):
            acc.load_state(tmp_path / "c")
        assert str(before) == str(full_parameters(model))


@ranks(2)
def test_places_without_a_checkpoint_are_named(rank, tmp_path):
    if rank == 0:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("")
        (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    dist.barrier()
    with accelerator(OURS) as acc:
        acc.prepare(net())
        with pytest.raises(CheckpointError, match="folder does not exist"):
            acc.load_state(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="it is empty"):
            acc.load_state(tmp_path / "empty")
        with pytest.raises(CheckpointError, match="under FSDP"):
            acc.load_state(tmp_path / "fsdp")
        with pytest.raises(CheckpointError, match="is a file"):
            acc.save_state(tmp_path / "file")
        with pytest.raises(ConfigError, match="No input_dir"):
            acc.load_state()
        with pytest.raises(ConfigError, match="output_dir"):
            acc.save_state()
        with pytest.raises(CheckpointError, match="should be a directory"):
            acc.save_model(acc._models[0], tmp_path / "file")
        with pytest.raises(ConfigError, match="max_shard_size"):
            acc.save_model(acc._models[0], tmp_path / "m", max_shard_size="large")
        assert not (tmp_path / "m").exists()


@dataclass
class Setting:
    value: int


class Odd(Counter):
    def state_dict(self):
        return {"count": Setting(3)}


@ranks(2)
def test_code_in_files_is_not_run_unless_the_user_says_so(rank, tmp_path):
    with accelerator(OURS) as acc:
        acc.prepare(net())
        odd = Odd()
        acc.register_for_checkpointing(odd)
        acc.save_state(tmp_path / "c")
        with pytest.raises(CheckpointError, match="weights_only"):
            acc.load_state(tmp_path / "c")
        acc.load_state(tmp_path / "c", load_kwargs={"weights_only": False})
        assert odd.count == Setting(3)
    with accelerator(OURS, shard_plugin=ShardPlugin(weights_only=False)) as acc:
        acc.prepare(net())
        acc.register_for_checkpointing(odd)
        acc.load_state(tmp_path / "c")


@pytest.mark.parametrize("what", CALLS[:3])
@ranks(2)
def test_inside_a_forward_it_is_refused(what, tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        model.layers[0].linear.register_forward_pre_hook(lambda *_: call(acc, what, model, tmp_path / "c"))
        with pytest.raises(UnitStateError, match="inside a forward"):
            model(torch.ones(2, 12))


@ranks(2)
def test_ranks_that_name_different_folders_are_told(rank, tmp_path):
    with accelerator(OURS) as acc:
        acc.prepare(net())
        with pytest.raises(ShardError, match="save_state"):
            acc.save_state(tmp_path / str(rank))
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("kind", [STOCK, OURS])
@ranks(2)
def test_without_models_everything_else_is_saved_and_loaded(kind, tmp_path):
    with accelerator(kind) as acc:
        counter = Counter()
        acc.register_for_checkpointing(counter)
        counter.count = 4
        acc.save_state(str(tmp_path / "c"))
        acc.wait_for_everyone()
        wanted = torch.rand(3)
        counter.count = 0
        acc.load_state(str(tmp_path / "c"))
        assert counter.count == 4
        assert torch.equal(torch.rand(3), wanted)
