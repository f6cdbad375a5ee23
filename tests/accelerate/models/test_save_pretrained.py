"""``save_pretrained`` of a sharded model: the whole model, in files that stock libraries load, or an error."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import OURS, accelerator, engine_of
from tests.support.hf_models import build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor
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
    model = build(name)[0]
    wanted = weights(model)
    with accelerator(OURS) as acc:
        acc.prepare(model).save_pretrained(tmp_path)
        assert_loads(tmp_path, wanted)  # on all ranks: the files are there when it returns
        files = ["config.json", "generation_config.json", "model.safetensors"]
        assert sorted(p.name for p in tmp_path.iterdir()) == files


@ranks(2)
def test_a_state_dict_is_written_in_the_standard_idiom_and_in_others_and_gathered_if_it_holds_shards(
    tmp_path: Path,
) -> None:
    model = build("gpt2")[0]
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        full = acc.get_state_dict(model)
        acc.unwrap_model(model).save_pretrained(
            tmp_path / "idiom", is_main_process=acc.is_main_process, save_function=acc.save, state_dict=full
        )
        model.save_pretrained(tmp_path / "full", state_dict=full)  # every rank takes itself for the main one
        model.save_pretrained(tmp_path / "shards", state_dict=model.state_dict())
        dist.barrier()
        for name in ("idiom", "full", "shards"):
            assert_loads(tmp_path / name, wanted)
        local = {name: value.to_local() for name, value in model.state_dict().items()}
        with pytest.raises(StateDictError, match="does not hold the full parameters"):
            model.save_pretrained(tmp_path / "local", state_dict=local)
        assert not (tmp_path / "local").exists()


@ranks(2)
def test_called_on_the_main_rank_alone_it_saves_the_full_model_too(tmp_path: Path) -> None:
    model, inputs, loss = build("gpt2")
    with accelerator(OURS) as acc:
        model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        acc.backward(loss(model(**inputs)))
        optimizer.step()
        wanted = acc.get_state_dict(model)
        if acc.is_main_process:
            acc.unwrap_model(model).save_pretrained(tmp_path)
            assert_loads(tmp_path, wanted)
        acc.backward(loss(model(**inputs)))  # where the other rank has gone on to


@ranks(2)
def test_where_a_rank_must_not_read_alone_it_raises_and_writes_nothing(tmp_path: Path) -> None:
    with accelerator(OURS, shard_plugin=ShardPlugin(alone="error", timeout=1)) as acc:
        model = acc.prepare(build("gpt2")[0])
        if acc.is_main_process:
            with pytest.raises(MissingRankError, match=r"GPT2LMHeadModel\.save_pretrained"):
                model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
    dist.barrier()


@ranks(2)
def test_large_models_are_written_in_several_files(tmp_path: Path) -> None:
    model = build("gpt2")[0]
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
            folder = tmp_path / precision
            acc.prepare(model).save_pretrained(folder)
            assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
            assert_loads(folder, wanted)


@ranks(2)
def test_a_part_of_the_model_and_a_copy_of_it_save_themselves(tmp_path: Path) -> None:
    model = build("gpt2")[0]
    wanted = weights(model)
    part = weights(model.transformer)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        model.transformer.save_pretrained(tmp_path / "part")
        loaded = type(model.transformer).from_pretrained(tmp_path / "part").state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in part.items())
        average = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        average.save_pretrained(tmp_path / "copy")
        assert_loads(tmp_path / "copy", wanted)


class SavesItself(torch.nn.Linear):
    """A model of another library, whose ``save_pretrained`` asks the module for its state."""

    def __init__(self) -> None:
        super().__init__(7, 5)

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        save_file(self.state_dict(), Path(folder) / "weights.safetensors")


@ranks(2)
def test_ranks_with_folders_of_their_own_each_write(tmp_path: Path, rank: int) -> None:
    model = SavesItself()
    wanted = weights(model)
    with accelerator(OURS) as acc:
        acc.prepare(model).save_pretrained(str(tmp_path / str(rank)))
        loaded = load_file(tmp_path / str(rank) / "weights.safetensors")
        assert all(torch.equal(loaded[name], value) for name, value in wanted.items())


@ranks(2)
def test_what_goes_wrong_while_one_rank_writes_is_raised_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with accelerator(OURS) as acc:
        model = acc.prepare(build("gpt2")[0])
        with pytest.raises(ShardError, match="file"):
            model.save_pretrained(tmp_path / "file" / "below")
        with pytest.raises(ConfigError, match="distributed_checkpoint"):
            model.save_pretrained(tmp_path, distributed_checkpoint=True)


@ranks(2)
def test_inside_gathered_and_after_close_it_is_the_stock_method_and_leaves_no_trace_in_pickles(
    tmp_path: Path, rank: int
) -> None:
    model = build("gpt2")[0]
    wanted = weights(model)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        with engine_of(model).gathered(ranks=0):
            if rank == 0:
                model.save_pretrained(tmp_path / "one")
                assert_loads(tmp_path / "one", wanted)
        engine_of(model).close()
        if rank == 0:
            model.save_pretrained(tmp_path / "plain")
            assert_loads(tmp_path / "plain", wanted)
        data = pickle.dumps(model)
        assert b"accelerate_shard" not in data
        loaded = pickle.loads(data)
        assert loaded.save_pretrained.__self__ is loaded and loaded.generate.__self__ is loaded
    dist.barrier()


class Encoder(torch.nn.Module):
    """Saves its parts itself, one after the other, and computes for its model card, as a SentenceTransformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = build("gpt2")[0]
        self.pooling = torch.nn.Linear(3, 2)

    def save_pretrained(self, folder: str | Path) -> None:
        with torch.no_grad():
            shape = self.pooling(self.auto_model(torch.tensor([[1, 2]])).logits[..., :3]).shape
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "README.md").write_text(f"It makes {tuple(shape)} of two tokens.")
        self.auto_model.save_pretrained(folder, safe_serialization=True)
        torch.save(self.pooling.state_dict(), Path(folder, "pooling.pt"))


@pytest.mark.parametrize("alone", [False, True])
@ranks(2)
def test_a_model_whose_save_computes_and_calls_that_of_a_part_is_saved(alone: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Encoder()
    wanted, pooling = weights(model.auto_model), weights(model.pooling)
    with accelerator(OURS) as acc:
        model = acc.prepare(model)
        if acc.is_main_process or not alone:
            model.save_pretrained(tmp_path)
        acc.wait_for_everyone()
        assert_loads(tmp_path, wanted)
        saved = torch.load(tmp_path / "pooling.pt")
        assert saved.keys() == pooling.keys() and all(torch.equal(saved[name], pooling[name]) for name in pooling)
        assert all(isinstance(p, ShardTensor) for p in model.state_dict().values())
