"""What can't be saved or loaded is an error on all ranks, and changes nothing."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator
from tests.accelerate.support.checkpoints import Counter, Noisy, Run, plugin
from tests.accelerate.support.models import net, sgd
from tests.accelerate.support.training import full_parameters
from tests.checkpoint.test_damaged_full import flip
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import CheckpointError, ConfigError, ShardError, StateDictError, UnitStateError

DAMAGES = {
    "sharded": [
        ("sharded/__1*", None),
        ("scheduler.bin", None),
        ("scheduler.bin", 100),
        ("custom_checkpoint_0.pkl", None),
        ("random_states_1.pkl", 100),
    ],
    "full": [("optimizer.bin", None), ("optimizer.bin", 500), ("model.safetensors", None), ("model.safetensors", 900)],
}
"""Files, and the bytes that are left of them."""


@pytest.mark.parametrize("form", ["sharded", *exhaustive("full")])
@ranks(2)
def test_a_checkpoint_that_is_damaged_or_incomplete_is_refused_and_nothing_changes(rank, form, tmp_path):
    with accelerator(OURS, shard_plugin=plugin(form)) as acc:
        first = Run(acc)
        first.train(steps=1)
        for number, (pattern, size) in enumerate(DAMAGES[form]):
            folder = tmp_path / str(number)
            acc.save_state(folder)
            if rank == 0:
                file = next(folder.glob(pattern))
                file.unlink() if size is None else os.truncate(file, size)
            acc.wait_for_everyone()
            first.train(steps=1)
            before, random = first.state(), torch.get_rng_state()
            with pytest.raises(CheckpointError):
                acc.load_state(folder)
            after = first.state()
            assert all(str(after[name]) == str(value) for name, value in before.items()), pattern
            assert torch.equal(torch.get_rng_state(), random), pattern
        first.train(steps=1)


@pytest.mark.parametrize("safe", [True, *exhaustive(False)])
@ranks(2)
def test_a_flipped_bit_in_any_file_with_checksums_is_refused_and_nothing_changes(rank, safe, tmp_path):
    with accelerator(OURS, shard_plugin=plugin("full")) as acc:
        first = Run(acc)
        teacher = acc.prepare_model(net(1), evaluation_mode=True)
        first.train(steps=1)
        acc.save_state(tmp_path, safe_serialization=safe)
        acc.wait_for_everyone()
        first.train(steps=1)
        before, random = first.state(), torch.get_rng_state()
        files = ["optimizer.bin", "scheduler.bin", *([] if safe else ["pytorch_model.bin", "pytorch_model_1.bin"])]
        for name in files:
            with zipfile.ZipFile(tmp_path / name) as archive:
                # The values of a tensor, if there are any.
                member = max(archive.infolist(), key=lambda info: ("/data/" in info.filename, info.file_size)).filename
            acc.wait_for_everyone()
            flip(tmp_path / name, member) if rank == 0 else None
            acc.wait_for_everyone()
            with pytest.raises(CheckpointError, match=rf"{name} is damaged"):
                acc.load_state(tmp_path)
            after = first.state()
            assert all(str(after[key]) == str(value) for key, value in before.items()), name
            assert torch.equal(torch.get_rng_state(), random), name
            acc.wait_for_everyone()
            flip(tmp_path / name, member) if rank == 0 else None
        acc.wait_for_everyone()
        acc.load_state(tmp_path)
        del teacher


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


@ranks(2)
def test_places_without_a_checkpoint_are_named(rank, tmp_path):
    if rank == 0:
        (tmp_path / "empty").mkdir()
        (tmp_path / "file").write_text("")
        (tmp_path / "fsdp" / "pytorch_model_fsdp_0").mkdir(parents=True)
    dist.barrier()
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        for error, said, call, *arguments in (
            (CheckpointError, "folder does not exist", acc.load_state, tmp_path / "nowhere"),
            (CheckpointError, "it is empty", acc.load_state, tmp_path / "empty"),
            (CheckpointError, "under FSDP", acc.load_state, tmp_path / "fsdp"),
            (CheckpointError, "is a file", acc.save_state, tmp_path / "file"),
            (CheckpointError, "should be a directory", acc.save_model, model, tmp_path / "file"),
            (ConfigError, "No input_dir", acc.load_state),
            (ConfigError, "output_dir", acc.save_state),
            (ConfigError, "max_shard_size", acc.save_model, model, tmp_path / "m", "large"),
        ):
            with pytest.raises(error, match=said):
                call(*arguments)
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


@ranks(2)
def test_inside_a_forward_it_is_refused(tmp_path):
    with accelerator(OURS) as acc:
        model = acc.prepare(net())
        calls = [
            lambda *_: acc.save_state(tmp_path / "c"),
            lambda *_: acc.get_state_dict(model),
            lambda *_: acc.save_model(model, tmp_path / "c"),
        ]
        for call in calls:
            handle = model.layers[0].linear.register_forward_pre_hook(call)
            with pytest.raises(UnitStateError, match="inside a forward"):
                model(torch.ones(2, 12))
            handle.remove()


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
