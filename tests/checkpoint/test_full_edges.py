"""Full checkpoints at their edges: views of one memory, names that mean two things, links, lost names, full disks, damage."""

from __future__ import annotations

import collections
import contextlib
import errno
import io
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from tests.checkpoint.helpers import alone, files_of, same, whole
from tests.support.ranks import ranks
from torch_shard.checkpoint.format.atomic_directory import find
from torch_shard.checkpoint.format.dcp_metadata import load_metadata
from torch_shard.checkpoint.format.safetensors import SafetensorsWriter
from torch_shard.checkpoint.format.torch_file import TorchFileWriter
from torch_shard.checkpoint.full import save
from torch_shard.checkpoint.full.open_files import is_full
from torch_shard.checkpoint.sharded.host_snapshot import SnapshotMemory
from torch_shard.errors import CheckpointError, StateDictError

NONCE = "0123456789abcdef"


# -- one memory, several values ---------------------------------------------------------------------------------------


def views() -> dict[str, torch.Tensor]:
    x = torch.tensor([1 + 2j, 3 - 4j])
    y = torch.tensor([5 + 6j, 7 - 8j])
    return {"x": x, "conj": x.conj(), "imag": y.imag, "neg": y.conj().imag, "same": x}


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        for name, value in views().items():
            self.register_buffer(name, value)


def test_conjugates_are_no_tied_tensors(tmp_path):
    expected = {name: value.clone() for name, value in views().items()}
    _model, engine = alone(Views)
    for asynchronous in (False, True):
        engine.save(tmp_path / "c", asynchronous=asynchronous)
        engine.finish_saving()
        again, other = alone(Views)
        for name, value in expected.items():
            setattr(again, name, torch.zeros_like(value))
        other.load(tmp_path / "c")
        assert all(torch.equal(again.get_buffer(name), value) for name, value in expected.items())
        other.close()
    engine.save_full(tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert found["x"].data_ptr() == found["same"].data_ptr()
    with contextlib.closing(TorchFileWriter(tmp_path / "small.pt", views())):
        pass
    found = torch.load(tmp_path / "small.pt", weights_only=True)
    copies = SnapshotMemory().snapshot(list(views().values()))
    for (name, value), copy in zip(expected.items(), copies, strict=True):
        assert torch.equal(found[name], value) and torch.equal(copy, value), name


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_name_with_and_without_a_wrapper_is_unexpected(tmp_path):
    _model, engine = alone(lambda: nn.Linear(2, 2))
    before = whole(engine)
    state = {"weight": torch.ones(2, 2), "module.weight": torch.zeros(2, 2), "module.bias": torch.ones(2)}
    torch.save(state, tmp_path / "both.pt")
    with pytest.raises(StateDictError, match=r"unexpected: module\.weight\n|unexpected: module\.weight$"):
        engine.load(tmp_path / "both.pt")
    twice = {"module.weight": torch.ones(2, 2), "_orig_mod.weight": torch.zeros(2, 2), "bias": torch.ones(2)}
    torch.save(twice, tmp_path / "twice.pt")
    with pytest.raises(StateDictError, match=r"unexpected: _orig_mod\.weight"):
        engine.load(tmp_path / "twice.pt")
    same(whole(engine), before)
    del state["module.weight"]
    torch.save(state, tmp_path / "one.pt")
    engine.load(tmp_path / "one.pt")
    assert torch.equal(whole(engine)["model"]["bias"], torch.ones(2))


class Own:
    """No loader lets it through."""


def test_metadata_that_would_not_be_loaded_is_refused(tmp_path):
    model, engine = alone()

    def hook(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        metadata["own"] = value

    model.register_state_dict_post_hook(hook)
    value: Any = Own()
    with pytest.raises(CheckpointError, match=r"_metadata can't be saved.*Own"):
        engine.save_full(tmp_path / "c.pt")
    assert not list(tmp_path.iterdir())
    value = "text"
    engine.save_full(tmp_path / "c.pt")
    assert torch.load(tmp_path / "c.pt", weights_only=True)._metadata[""]["own"] == "text"


@pytest.mark.parametrize("tied", [False, True])
def test_a_name_that_safetensors_can_not_hold_is_refused(tied, tmp_path):
    pytest.importorskip("safetensors")
    name, entry = "__metadata__", (torch.Size((2,)), torch.float32)
    with pytest.raises(CheckpointError, match=r"can't be saved: safetensors files have.*format=\"torch\""):
        SafetensorsWriter(tmp_path, {"a": entry} if tied else {name: entry}, tied={name: "a"} if tied else {})
    assert not list(tmp_path.iterdir())


# -- directories ------------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_directory_that_is_a_link_is_replaced_by_one_of_its_own(rank, tmp_path):
    """As a download cache has it: links that count from where they are."""
    pytest.importorskip("safetensors")
    _model, engine = alone()
    cache = tmp_path / "hub" / "snapshots" / "abc"
    if rank == 0:
        cache.mkdir(parents=True)
        (tmp_path / "hub" / "blobs").mkdir()
        (tmp_path / "hub" / "blobs" / "cfg").write_text("{}")
        (cache / "config.json").symlink_to("../../blobs/cfg")
        (cache / "vocab.txt").write_text("a")
        (cache / "gone").symlink_to("../nothing")
        (tmp_path / "out").symlink_to("hub/snapshots/abc")
    dist.barrier()
    engine.save_full(tmp_path / "out", format="safetensors")
    dist.barrier()
    out = tmp_path / "out"
    assert not out.is_symlink() and files_of(out) == ["config.json", "gone", "model.safetensors", "vocab.txt"]
    assert (out / "config.json").read_text() == "{}" and (out / "vocab.txt").read_text() == "a"
    assert os.readlink(out / "gone") == str(tmp_path / "hub" / "snapshots" / "nothing")
    assert files_of(cache) == ["config.json", "gone", "vocab.txt"]
    assert not (out / "vocab.txt").samefile(cache / "vocab.txt")


@pytest.mark.parametrize("size", [300, "5GB"])
def test_safetensors_that_lost_their_name_between_two_renames_are_found(size, tmp_path):
    pytest.importorskip("safetensors")
    _model, engine = alone()
    engine.save_full(tmp_path / "c", max_shard_size=size)
    expected = whole(engine)
    aside = tmp_path / f".c.previous-{NONCE}"
    os.rename(tmp_path / "c", aside)
    assert is_full(tmp_path / "c") and find(tmp_path / "c") == aside
    _again, other = alone(seed=1)
    other.load(tmp_path / "c")
    same(whole(other), expected)
    engine.save_full(tmp_path / "c")
    assert files_of(tmp_path) == ["c"] and files_of(tmp_path / "c") == ["model.safetensors"]


def test_a_sharded_checkpoint_that_lost_its_name_is_not_replaced(tmp_path):
    pytest.importorskip("safetensors")
    _model, engine = alone()
    engine.save(tmp_path / "c")
    os.rename(tmp_path / "c", tmp_path / f".c.previous-{NONCE}")
    with pytest.raises(CheckpointError, match="holds a sharded checkpoint"):
        engine.save_full(tmp_path / "c")
    assert files_of(tmp_path) == ["c"]
    engine.load(tmp_path / "c")


# -- what fails -------------------------------------------------------------------------------------------------------


@ranks(2)
def test_memory_that_one_rank_lacks_is_an_error_on_all(rank, tmp_path, monkeypatch):
    _model, engine = alone()

    def none(*given: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    if rank == 1:
        monkeypatch.setattr(save, "buffer", none)
    with pytest.raises(CheckpointError, match=r"Cannot allocate memory"):
        engine.save_full(tmp_path / "c.pt")
    monkeypatch.undo()
    dist.barrier()
    assert not list(tmp_path.iterdir())
    engine.save_full(tmp_path / "c.pt")


class Extra(nn.Linear):
    """Keeps a dict whose class has another constructor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.kept: Any = collections.defaultdict(list)

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def test_what_is_allowed_in_extra_keeps_its_class_and_leaves_the_file(tmp_path):
    shared = torch.ones(3)
    extra = {"d": collections.defaultdict(list), "a": [shared, shared], "c": collections.Counter("aab")}
    with torch.serialization.safe_globals([collections.defaultdict, list]):
        _model, engine = alone(Extra)
        engine.save_full(tmp_path / "c.pt", extra=extra)
        again, other = alone(Extra, seed=1)
        found = other.load(tmp_path / "c.pt")
    (tmp_path / "c.pt").write_bytes(bytes((tmp_path / "c.pt").stat().st_size))
    assert (
        type(found["d"]) is type(again.kept) is collections.defaultdict and found["d"]["new"] == again.kept["new"] == []
    )
    assert found["a"][0] is found["a"][1] and torch.equal(found["a"][0], shared) and found["c"]["a"] == 2


class Uncopied:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies")


def test_extra_that_can_not_be_copied_fails_before_anything_is_changed(tmp_path):
    with torch.serialization.safe_globals([Uncopied]):
        _model, engine = alone()
        engine.save_full(tmp_path / "c.pt", extra=Uncopied())
        _again, other = alone(seed=1)
        before = whole(other)
        with pytest.raises(CheckpointError, match=r"c\.pt: extra can't be copied.*no copies"):
            other.load(tmp_path / "c.pt")
    same(whole(other), before)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_metadata_with_any_bit_flipped_is_read_or_refused(tmp_path):
    dcp.save({"model": {"w": torch.randn(4, 3)}, "n": 3}, checkpoint_id=tmp_path / "c", no_dist=True)
    raw = (tmp_path / "c" / ".metadata").read_bytes()
    refused = 0
    for at in range(len(raw)):
        for bit in (0, 2, 6):
            bad = bytearray(raw)
            bad[at] ^= 1 << bit
            try:
                found = load_metadata(io.BytesIO(bytes(bad)), "x")
            except CheckpointError:
                refused += 1
                continue
            # Whatever is used of it is there.
            for entry in found.state_dict_metadata.values():
                for chunk in getattr(entry, "chunks", ()):
                    assert len(chunk.offsets) == len(chunk.sizes) == len(entry.size) and entry.properties.dtype
            for index, info in found.storage_data.items():
                assert index.fqn and info.relative_path.lower() and info.offset + info.length >= 0
            assert found.storage_meta.save_id or found.planner_data is not None
    assert refused > len(raw)
