"""verify: every kind of damage is found, with file and parameter, and nothing else is."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

import torch_shard
from tests.checkpoint.helpers import bits, files_of
from tests.checkpoint.test_bad_files import of_version, values_of
from tests.support.damage import Bomb, flip, metadata_of, rezipped, write_metadata
from torch_shard.checkpoint.format.chunks import covers
from torch_shard.checkpoint.format.manifest import read_manifest

OF_OURS = ["ours", "wide", "several", "ours_lightning"]
OF_OTHERS = ["fsdp2", "ddp", "titan", "app", "lightning", "plain.pt", "trainer.ckpt"]


@pytest.mark.parametrize("kind", [*OF_OURS, *OF_OTHERS])
def test_what_is_good_is_good(kind, made, cli):
    found = cli("verify", made / kind, "--json")
    assert found["good"] is True and found["problems"] == [] and found["bytes"] > 0
    assert "is good" in cli("verify", made / kind)


def test_what_a_hook_leaves_out_or_converts_is_not_lost(tmp_path, cli):
    def change(module, state, prefix, metadata):
        for name, p in module.named_parameters():
            if not p.requires_grad:
                del state[prefix + name]
        state["1.weight"] = state["1.weight"].half()

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model.register_state_dict_post_hook(change)
    torch_shard.shard(model).save(tmp_path / "c")
    assert "is good" in cli("verify", tmp_path / "c")
    rows = read_manifest(tmp_path / "c").parameters
    assert [(row["name"], row["dtype"]) for row in rows] == [("1.weight", "float16"), ("1.bias", "float32")]


@pytest.mark.parametrize(
    "names",
    [
        ["model.net.head.bias"],
        ["model.norm.running_mean"],
        ["optimizer.state.net.scale.exp_avg"],
        ["model.net.conv.weight", "model.norm.bias", "extra"],
    ],
)
def test_all_flipped_bits_in_ours_are_listed(names, copied, cli):
    folder = copied("ours")
    files = []
    for name in names:
        file, position = values_of(folder, name)
        flip(folder / file, position)
        files.append(file)
    found = cli("verify", folder, "--json", expected=1)
    assert found["good"] is False and sorted(problem["file"] for problem in found["problems"]) == sorted(files)
    out = cli("verify", folder, expected=1)
    assert f"{folder} is damaged:\n" in out
    for name, file in zip(names, files, strict=True):
        assert any(name in problem["entries"] for problem in found["problems"])
        assert f"  {file}: bytes [" in out and name in out


def test_files_of_ours_that_are_cut_off_or_missing(copied, cli):
    folder = copied("ours")
    os.truncate(folder / "__1_0.distcp", 2000)
    (problem, *_) = cli("verify", folder, "--json", expected=1)["problems"]
    assert problem["file"] == "__1_0.distcp" and "has 2000 bytes" in problem["problem"] and problem["entries"]
    (folder / "__1_0.distcp").unlink()
    (problem,) = cli("verify", folder, "--json", expected=1)["problems"]
    assert "missing" in problem["problem"] and any(name.startswith("model.") for name in problem["entries"])


def test_descriptions_of_ours(copied, cli, tmp_path):
    for name in ("manifest.json", ".metadata"):
        folder = copied("ours")
        flip(folder / name, (folder / name).stat().st_size // 2)
        assert name in cli("verify", folder, expected=1)
        (folder / name).unlink()
        assert name in cli("verify", folder, expected=1)
        shutil.rmtree(folder)
    folder = copied("ours")
    of_version(folder, 2)
    assert "Upgrade" in cli("verify", folder, expected=2)


def test_damage_is_damage_whatever_the_path_is_called(made, tmp_path, cli):
    for name in ("Upgrade", "compressed members"):
        folder = tmp_path / name / "c"
        shutil.copytree(made / "ours", folder)
        (folder / ".metadata").unlink()
        assert ".metadata" in cli("verify", folder, expected=1)
    (tmp_path / name / "a.safetensors").write_bytes(b"cut off")
    assert "damaged" in cli("verify", tmp_path / name / "a.safetensors", expected=1)


def test_metadata_of_another_checkpoint(made, copied, cli):
    folder = copied("ours")
    shutil.copy(made / "wide" / ".metadata", folder / ".metadata")
    assert ".metadata" in cli("verify", folder, expected=1)


def test_dcps_own_files(copied, cli):
    folder = copied("fsdp2")
    metadata = metadata_of(folder)
    info = next(own for index, own in metadata.storage_data.items() if index.fqn == "model.head.weight")
    path = folder / info.relative_path
    good = path.read_bytes()
    values = torch.load(io.BytesIO(good[info.offset : info.offset + info.length]), weights_only=True)
    flip(path, good.index(bits(values).numpy().tobytes(), info.offset))
    found = cli("verify", folder, "--json", expected=1)["problems"]
    assert [(p["file"], p["entries"]) for p in found] == [(path.name, ["model.head.weight"])]
    path.write_bytes(good[: info.offset + 10])
    found = cli("verify", folder, "--json", expected=1)["problems"]
    assert any("model.head.weight" in p["entries"] and p["file"] == path.name for p in found)
    path.unlink()
    assert f"model.head.weight is damaged or lost: [Errno 2] No such file or directory: '{path}'" in cli(
        "verify", folder, expected=1
    )


def test_torch_files(copied, cli):
    path = copied("plain.pt")
    values = torch.load(path, weights_only=True)["optimizer"]["state"][3]["exp_avg"]
    flip(path, path.read_bytes().index(bits(values).numpy().tobytes()) + 9)
    (problem,) = cli("verify", path, "--json", expected=1)["problems"]
    assert problem["file"] == "plain.pt" and "/data/" in problem["problem"]
    os.truncate(path, 1000)
    assert "cut off at 1000 bytes" in cli("verify", path, expected=1)


def test_safetensors(made, tmp_path, cli):
    cli("consolidate", made / "fsdp2", tmp_path / "hf", "--format", "safetensors", "--max-shard-size", "500")
    assert "is good" in cli("verify", tmp_path / "hf")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    name, file = next(iter(index["weight_map"].items()))
    path = tmp_path / "hf" / file
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    out = cli("verify", tmp_path / "hf", expected=1)
    assert file in out and name in out
    path.unlink()
    assert file in cli("verify", tmp_path / "hf", expected=1)
    (tmp_path / "x.safetensors").write_bytes(data + b"more")
    cli("verify", tmp_path / "x.safetensors", expected=1)


def test_what_is_no_checkpoint_is_an_error_and_not_damage(tmp_path, cli):
    assert "no checkpoint at" in cli("verify", tmp_path / "nothing", expected=2)
    assert "holds no checkpoint" in cli("verify", tmp_path, expected=2)
    (tmp_path / "x.txt").write_text("hello")
    assert "neither" in cli("verify", tmp_path / "x.txt", expected=2)
    torch.save([1, 2], tmp_path / "list.pt")
    cli("verify", tmp_path / "list.pt")
    assert "no dict" in cli("inspect", tmp_path / "list.pt", expected=2)


def test_a_bomb_in_a_checkpoint_is_not_touched_off(made, copied, tmp_path, cli, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "extra": Bomb()}, tmp_path / "bomb.pt")
    assert "could run code" in cli("inspect", "bomb.pt", expected=2)
    assert "could run code" in cli("consolidate", "bomb.pt", "y.pt", expected=2)
    folder = copied("lightning")
    torch.save({"pytorch-lightning_version": "2", "hyper_parameters": Bomb()}, folder / "meta.pt")
    assert "could run code" in cli("consolidate", folder, "y.pt", expected=2)
    assert "could run code" in cli("inspect", folder)
    cli("consolidate", folder, "y.pt", "--model-only")
    assert sorted(p.name for p in Path(".").iterdir()) == ["bomb.pt", "lightning", "y.pt"]


@pytest.mark.parametrize(
    ("size", "boxes", "good"),
    [
        ((4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ((4, 3), [((2, 0), (2, 3)), ((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))], True),
        ((4, 3), [((0, 0), (2, 3))], False),
        ((4, 3), [((0, 0), (2, 3)), ((1, 0), (2, 3))], False),
        ((4, 3), [((0, 0), (2, 3)), ((3, 0), (2, 3))], False),
        ((4,), [((0, 0), (4, 1))], False),
        ((), [((), ())], True),
        ((), [((), ()), ((), ())], False),
        ((0, 4), [((0, 0), (0, 4))], True),
        ((0,), [], True),
    ],
)
def test_parts_make_up_a_tensor_or_do_not(size, boxes, good):
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    assert covers(size, chunks) is good


def test_an_entry_that_the_metadata_lost_is_found(made, copied, tmp_path, cli):
    """In torch's own checkpoints, where nothing but the metadata says what there must be."""
    folder = copied("fsdp2")
    metadata = metadata_of(folder)
    lost = next(i for i in metadata.storage_data if i.fqn == "model.head.weight")
    del metadata.storage_data[MetadataIndex(lost.fqn, lost.offset)]
    write_metadata(folder, metadata)
    assert "model.head.weight is damaged or lost" in cli("verify", folder, expected=1)
    assert "model.head.weight" in cli("consolidate", folder, tmp_path / "y.pt", expected=2)
    metadata.state_dict_metadata["model.head.weight"].chunks.pop()
    write_metadata(folder, metadata)
    assert "its parts do not make up its shape" in cli("verify", folder, expected=1)
    assert "model.head.weight is not complete" in cli("consolidate", folder, tmp_path / "y.pt", expected=2)
    assert "model.head.weight is not complete" in cli("diff", folder, made / "fsdp2", expected=2)
    assert files_of(tmp_path) == ["fsdp2"]


# -- damage that makes readers stumble -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "value"),
    [
        pytest.param(10, 14, id="of LZMA"),
        pytest.param(45, 0x7F, id="elsewhere"),
        pytest.param(28, 0xFF, id="with a longer name"),
    ],
)
def test_a_damaged_directory_of_an_archive(at, value, tmp_path, cli):
    torch.save({"w": torch.ones(50)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(b"PK\x01\x02") + at] = value
    (tmp_path / "a.pt").write_bytes(data)
    found = cli("verify", tmp_path / "a.pt", "--json", expected=1)
    assert found["problems"][0]["file"] == "a.pt"


def _entry(folder, name):
    metadata = metadata_of(folder)
    offset = next((i.offset for i in metadata.storage_data if i.fqn == name), None)
    return metadata.storage_data[MetadataIndex(name, offset)]


@pytest.mark.parametrize(("kind", "name"), [("fsdp2", "model.head.weight"), ("titan", "train_state.step")])
def test_an_entry_of_dcp_that_is_no_archive_any_more(kind, name, copied, cli):
    folder = copied(kind)
    info = _entry(folder, name)
    path = folder / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset] ^= 0xFF
    path.write_bytes(data)
    (problem,) = cli("verify", folder, "--json", expected=1)["problems"]
    assert problem["entries"] == [name] and path.name == problem["file"]


def test_an_object_of_dcp_with_a_whole_archive_that_can_not_be_read(copied, tmp_path, cli):
    """One whose class is not known is good, and one whose pickle is none is not."""
    folder = copied("titan")
    info = _entry(folder, "train_state.step")
    path = folder / info.relative_path
    good = path.read_bytes()
    metadata = metadata_of(folder)
    for content, expected in ((Bomb(), 0), (None, 1)):
        made = io.BytesIO()
        torch.save(content, made)
        data = made.getvalue()
        if content is None:
            data = rezipped(data, data_pkl=b"\x80\x02X no pickle")
        path.write_bytes(good + data)
        index = next(i for i in metadata.storage_data if i.fqn == "train_state.step")
        metadata.storage_data[index].offset, metadata.storage_data[index].length = len(good), len(data)
        write_metadata(folder, metadata)
        found = cli("verify", folder, "--json", expected=expected)["problems"]
        assert [problem["entries"] for problem in found] == ([["train_state.step"]] if expected else [])
