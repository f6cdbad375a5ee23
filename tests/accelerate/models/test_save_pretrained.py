"""``save_pretrained`` of a sharded model: the whole model, in files that stock libraries load, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import OURS, accelerator
from tests.support.hf_models import build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, MissingRankError, ShardError, StateDictError


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_loads(folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Stock transformers read the folder to exactly `wanted`, dtypes included."""
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert list(loaded) == list(wanted)
    for name, value in wanted.items():
        assert loaded[name].dtype == value.dtype, name
        assert torch.equal(loaded[name], value), name


@pytest.mark.parametrize("name", ["gpt2", *exhaustive("llama")])
@ranks(2)
def test_called_on_all_ranks_it_saves_the_full_model(tmp_path: Path, name: str) -> None:
    model, _, _ = build(name)
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.save_pretrained(tmp_path)
        assert_loads(tmp_path, wanted)  # on all ranks: the files are there when it returns
        assert sorted(p.name for p in tmp_path.iterdir()) == [
            "config.json", "generation_config.json", "model.safetensors",
        ]  # fmt: skip


@ranks(2)
def test_the_standard_idiom_saves_the_full_model(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        acc.unwrap_model(model).save_pretrained(
            tmp_path,
            is_main_process=acc.is_main_process,
            save_function=acc.save,
            state_dict=acc.get_state_dict(model),
        )
        dist.barrier()
        assert_loads(tmp_path, wanted)


@ranks(2)
def test_a_gathered_state_dict_is_written_though_every_rank_takes_itself_for_the_main_one(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        state = acc.get_state_dict(model)
        model.save_pretrained(tmp_path, state_dict=state)
        dist.barrier()
        assert_loads(tmp_path, wanted)


@ranks(2)
def test_a_state_dict_of_shards_is_gathered(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
        assert_loads(tmp_path, wanted)


@ranks(2)
def test_a_state_dict_of_parts_is_refused(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        local = {name: value.to_local() for name, value in model.state_dict().items()}
        with pytest.raises(StateDictError, match="does not hold the full parameters"):
            model.save_pretrained(tmp_path, state_dict=local)
        assert not list(tmp_path.iterdir())


def acc_engine(model: torch.nn.Module) -> Any:
    from tests.accelerate.support.accelerators import engine_of

    return engine_of(model)


@pytest.mark.exhaustive
@ranks(2)
def test_called_on_the_main_rank_alone_it_raises_and_writes_nothing(tmp_path: Path, rank: int) -> None:
    model, _, _ = build("gpt2")
    with accelerator(OURS, shard_plugin=ShardPlugin(timeout=1)) as acc:
        model = acc.prepare(model)
        if acc.is_main_process:
            with pytest.raises(MissingRankError, match=r"GPT2LMHeadModel\.save_pretrained"):
                model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
    dist.barrier()


@ranks(2)
def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.save_pretrained(tmp_path, max_shard_size="40KB", variant="x")
        model.save_pretrained(tmp_path, max_shard_size="40KB")
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        assert index["metadata"]["total_parameters"] == sum(p.numel() for p in model.parameters())
        assert_loads(tmp_path, wanted)


@ranks(2)
def test_weights_are_saved_in_the_dtype_that_they_are_stored_in(tmp_path: Path) -> None:
    for dtype, precision in ((torch.float32, "bf16"), (torch.bfloat16, "no")):
        model = build("llama")[0].to(dtype)
        wanted = weights(model)
        with accelerator(OURS, mixed_precision=precision) as acc:
            model = acc.prepare(model)
            folder = tmp_path / precision
            model.save_pretrained(folder)
            assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
            assert_loads(folder, wanted)


@ranks(2)
def test_a_part_of_the_model_saves_itself(tmp_path: Path) -> None:
    from transformers import GPT2Model

    model, _, _ = build("gpt2")
    wanted = weights(model.transformer)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.transformer.save_pretrained(tmp_path)
        loaded = GPT2Model.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


@ranks(2)
def test_ranks_with_folders_of_their_own_each_write(tmp_path: Path, rank: int) -> None:
    from safetensors.torch import load_file

    model = SavesItself()
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.save_pretrained(str(tmp_path / str(rank)))
        loaded = load_file(tmp_path / str(rank) / "weights.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


class SavesItself(torch.nn.Linear):
    """A model of another library, whose ``save_pretrained`` asks the module for its state."""

    def __init__(self) -> None:
        super().__init__(7, 5)

    def save_pretrained(self, folder: str) -> None:
        from safetensors.torch import save_file

        Path(folder).mkdir()
        save_file(self.state_dict(), Path(folder) / "weights.safetensors")


@ranks(2)
def test_what_goes_wrong_while_one_rank_writes_is_raised_on_all(tmp_path: Path) -> None:
    model, _, _ = build("gpt2")
    (tmp_path / "file").touch()
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        with pytest.raises(ShardError, match="file"):
            model.save_pretrained(tmp_path / "file" / "below")
        with pytest.raises(ConfigError, match="distributed_checkpoint"):
            model.save_pretrained(tmp_path, distributed_checkpoint=True)


@ranks(2)
def test_inside_gathered_and_after_close_it_is_the_stock_method(tmp_path: Path, rank: int) -> None:
    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        with acc_engine(model).gathered(ranks=0):
            if rank == 0:
                model.save_pretrained(tmp_path / "one")
                assert_loads(tmp_path / "one", wanted)
        acc_engine(model).close()
        if rank == 0:
            model.save_pretrained(tmp_path / "plain")
            assert_loads(tmp_path / "plain", wanted)
    dist.barrier()


@ranks(2)
def test_a_closed_model_is_pickled_without_a_trace(tmp_path: Path) -> None:
    import pickle

    model, _, _ = build("gpt2")
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        acc_engine(model).close()
        data = pickle.dumps(model)
        assert b"accelerate_shard" not in data
        loaded = pickle.loads(data)
        assert loaded.save_pretrained.__self__ is loaded and loaded.generate.__self__ is loaded


@ranks(2)
def test_deep_copies_save_themselves(tmp_path: Path) -> None:
    import copy

    model, _, _ = build("gpt2")
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        average = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        average.save_pretrained(tmp_path)
        assert_loads(tmp_path, wanted)
