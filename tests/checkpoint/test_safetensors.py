"""Full checkpoints in safetensors: Hugging Face's names, tied weights, and what other tools read and write."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.checkpoint.helpers import alone, comes_back, files_of, same, whole
from tests.support.odd_model import Net
from tests.support.ranks import ranks
from torch_shard.checkpoint.format.safetensors import SafetensorsWriter, size_of
from torch_shard.checkpoint.full.open_files import open_full
from torch_shard.errors import CheckpointError, ConfigError, UnavailableError

safetensors = pytest.importorskip("safetensors.torch")


@ranks(2, exhaustive=(3,))
def test_a_model_in_one_file_or_many_comes_back(rank, tmp_path):
    _model, engine = alone()
    expected = whole(engine)["model"]
    for path, size in (("one.safetensors", "5GB"), ("folder", "5GB"), ("many", 300)):
        engine.save_full(tmp_path / path, max_shard_size=size)
        _again, other = alone(seed=1)
        other.load(tmp_path / path)
        same(whole(other)["model"], expected)
        other.close()
    assert files_of(tmp_path / "folder") == ["model.safetensors"]
    names = files_of(tmp_path / "many")
    count = len(names) - 1
    assert names == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] + [
        "model.safetensors.index.json"
    ]
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    stored = {name: value for name, value in expected.items() if name != "head.weight"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in stored.values())
    assert sorted(index["weight_map"]) == sorted(stored)
    for name in names[:-1]:
        values = safetensors.load_file(tmp_path / "many" / name)
        assert len(values) == 1 or sum(value.nbytes for value in values.values()) <= 300
        same(values, {key: stored[key] for key, file in index["weight_map"].items() if file == name})


@ranks(2)
def test_tied_weights_are_stored_once_and_load_model_takes_them(rank, tmp_path):
    _model, engine = alone()
    engine.save_full(tmp_path / "c.safetensors")
    with safetensors.safe_open(tmp_path / "c.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert "head.weight" not in set(file.keys())
    plain = Net()
    safetensors.load_model(plain, tmp_path / "c.safetensors")
    same(dict(plain.state_dict()), whole(engine)["model"])


class Chosen(Net):
    _tied_weights_keys = ("embed.weight",)


@ranks(2)
def test_the_model_says_which_of_tied_names_is_kept(rank, tmp_path):
    _model, engine = alone(Chosen)
    engine.save_full(tmp_path / "c.safetensors")
    found = open_full(tmp_path / "c.safetensors")
    assert found.tied == {"embed.weight": "head.weight"} and "embed.weight" not in found.values
    comes_back(tmp_path / "c.safetensors", engine, model=Chosen)


def test_the_formats_own_metadata_names_no_tensor(tmp_path):
    path = tmp_path / "c.safetensors"
    safetensors.save_file({"pt": torch.ones(2)}, path, metadata={"format": "pt", "tied": "pt"})
    assert open_full(path).tied == {"tied": "pt"}
    safetensors.save_file({"w": torch.ones(2)}, path, metadata={"format": "w"})  # as save_model names a tied tensor
    assert open_full(path).tied == {"format": "w"}


@ranks(2)
def test_a_file_of_save_model_is_loaded(rank, tmp_path):
    torch.manual_seed(4)
    plain = Net()
    if rank == 0:
        safetensors.save_model(plain, str(tmp_path / "c.safetensors"))
    dist.barrier()
    _model, engine = alone()
    engine.load(tmp_path / "c.safetensors")
    same(whole(engine)["model"], dict(plain.state_dict()))


def gpt2(seed: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


@ranks(2)
def test_from_pretrained_loads_it(rank, tmp_path):
    pytest.importorskip("transformers")
    model = gpt2(0)
    engine = torch_shard.shard(model, timeout=60.0)
    for folder, size in (("one", "5GB"), ("many", 2000)):
        if rank == 0:
            model.config.save_pretrained(tmp_path / folder)
        dist.barrier()
        engine.save_full(tmp_path / folder, max_shard_size=size)
        assert "config.json" in files_of(tmp_path / folder)
        state = engine.state_dict(rank0_only=False)
        found, report = type(model).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        same(dict(found.state_dict()), dict(state))
    again = gpt2(1)
    other = torch_shard.shard(again, timeout=60.0)
    if rank == 0:
        found.save_pretrained(tmp_path / "theirs", max_shard_size="4KB")
    dist.barrier()
    other.load(tmp_path / "theirs")
    same(dict(other.state_dict(rank0_only=False)), dict(state))


@ranks(2)
def test_shards_that_are_missing_or_cut_are_named_with_their_parameters(rank, tmp_path):
    _model, engine = alone()
    before = whole(engine)
    engine.save_full(tmp_path / "c", max_shard_size=300)
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())["weight_map"]
    file = tmp_path / "c" / index["conv.weight"]
    size = file.stat().st_size
    dist.barrier()
    for length, message in (
        (size - 4, rf"{file.name} is damaged or was cut off.*conv\.weight"),
        (5, rf"{file.name} is damaged or was cut off.*conv\.weight"),
        (None, rf"{file.name} is missing, with .*conv\.weight"),
    ):
        if rank == 0:
            file.unlink() if length is None else os.truncate(file, length)
        dist.barrier()
        with pytest.raises(CheckpointError, match=message):
            engine.load(tmp_path / "c")
    same(whole(engine), before)


@ranks(2)
def test_the_name_decides_the_format(rank, tmp_path):
    _model, engine = alone()
    if rank == 0:
        (tmp_path / "there.pt").mkdir()
    dist.barrier()
    for name, kind in (
        ("c.pt", "torch"),
        ("c.ckpt", "torch"),
        ("c.safetensors", "safetensors"),
        ("plain", "safetensors"),
        ("llama-3.1-8b", "safetensors"),
        ("there.pt", "safetensors"),
    ):
        engine.save_full(tmp_path / name)
        assert open_full(tmp_path / name).kind == kind
    engine.save_full(tmp_path / "weights", format="torch")
    assert open_full(tmp_path / "weights").kind == "torch"
    if rank == 0:
        os.link(tmp_path / "c.safetensors", tmp_path / "0a1b2c")  # as a download cache names it
    dist.barrier()
    assert open_full(tmp_path / "0a1b2c").kind == "safetensors"


@ranks(2)
def test_a_directory_keeps_its_other_files_and_loses_old_shards(rank, tmp_path):
    _model, engine = alone()
    folder = tmp_path / "c"
    engine.save_full(folder, max_shard_size=300)
    if rank == 0:
        (folder / "config.json").write_text("{}")
        folder.chmod(0o750)
    dist.barrier()
    engine.save_full(folder)
    assert files_of(folder) == ["config.json", "model.safetensors"]
    assert (folder / "config.json").read_text() == "{}" and folder.stat().st_mode & 0o777 == 0o750
    assert files_of(tmp_path) == ["c"]


@ranks(2)
def test_directories_that_would_lose_something_are_refused(rank, tmp_path):
    _model, engine = alone()
    engine.save(tmp_path / "sharded")
    if rank == 0:
        for name in ("below/deeper", "torch"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "torch" / "pytorch_model.bin").touch()
        (tmp_path / "file").touch()
    dist.barrier()
    for name, message in (
        ("sharded", "holds a sharded checkpoint"),
        ("below", r"has directories in it \(deeper\)"),
        ("torch", r"holds other weights \(pytorch_model\.bin\)"),
        ("file", "is a file, and the safetensors form is a directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            engine.save_full(tmp_path / name, format="safetensors")
    assert files_of(tmp_path) == ["below", "file", "sharded", "torch"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("phases", torch.ones(2, dtype=torch.complex128))


@ranks(2)
def test_a_dtype_that_the_format_lacks_is_named(rank, tmp_path):
    model = Odd()
    engine = torch_shard.shard(model, timeout=60.0)
    with pytest.raises(CheckpointError, match=r"phases can't be saved.*complex128.*format=\"torch\""):
        engine.save_full(tmp_path / "c")
    dist.barrier()  # rank 0 tidies up when it has told the others
    assert not list(tmp_path.iterdir())


@ranks(2)
def test_without_the_library_the_error_says_what_to_install(rank, tmp_path):
    _model, engine = alone()
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "safetensors"}
    sys.modules["safetensors"] = None  # type: ignore[assignment]
    try:
        with pytest.raises(UnavailableError, match=r"pip install torch-shard-engine\[safetensors\]"):
            engine.save_full(tmp_path / "c")
        (tmp_path / "c.safetensors").touch()
        with pytest.raises(UnavailableError, match=r"pip install torch-shard-engine\[safetensors\]"):
            engine.load(tmp_path / "c.safetensors")
    finally:
        del sys.modules["safetensors"]
        sys.modules.update(kept)


# -- the writer by itself ---------------------------------------------------------------------------------------------


def test_a_tensor_that_is_too_large_has_a_file_for_itself(tmp_path):
    values = {"a": torch.ones(2), "large": torch.ones(100), "b": torch.ones(2), "c": torch.ones(2)}
    writer = SafetensorsWriter(tmp_path, {n: (v.shape, v.dtype) for n, v in values.items()}, max_shard_size=50)
    for name, value in values.items():
        writer.write(name, value)
    writer.finish()
    assert [list(names) for names in writer.files.values()] == [["a"], ["large"], ["b", "c"]]
    same(open_full(tmp_path).values, values)


def test_a_model_without_entries_is_a_file_without_entries(tmp_path):
    SafetensorsWriter(tmp_path, {}).finish()
    assert open_full(tmp_path).values == {}


def test_an_index_leads_to_no_other_folder(tmp_path):
    Path(tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        open_full(tmp_path)


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 KiB", 1536), (7, 7), ("12", 12), ("3mb", 3 * 10**6)]
)
def test_sizes_are_numbers_or_text(text, size):
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", 0, True, None, 1.5, "5 parsecs"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="max_shard_size"):
        size_of(text)
