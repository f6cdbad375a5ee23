"""Damaged, foreign and hostile files: an error on all ranks that names file and parameter, and nothing half loaded."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.checkpoint.helpers import adamw, build, files_of, load, same, save, train, whole
from tests.support.damage import Bomb, flip, full_disk, metadata_of, write_metadata
from tests.support.marks import quick
from tests.support.odd_model import Net
from tests.support.ranks import ranks
from torch_shard.errors import CheckpointError, StateDictError


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(600, 400), nn.Linear(400, 3))


def refused(rank: int, folder: Path, damage: Callable[[Path], None], match: str, error: type = CheckpointError) -> None:
    """Save, damage, and see that loading fails on all ranks and changes nothing; then that a good one loads."""
    model, engine, optimizer = build(model=wide)
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    save(engine, folder / "c", optimizer, extra={"a": 1})
    if rank == 0:
        shutil.copytree(folder / "c", folder / "good")
        damage(folder / "c")
    dist.barrier()
    again, other, second = build(seed=1, model=wide)
    again(torch.ones(2, 600)).sum().backward()
    second.step()
    before = whole(other, second)
    with pytest.raises(error, match=match):
        load(other, folder / "c", second)
    same(whole(other, second), before)
    load(other, folder / "good", second)
    same(whole(other, second), whole(engine, optimizer))


def values_of(folder: Path, name: str) -> tuple[str, int]:
    """The file and position of the first values of an entry."""
    found = json.loads((folder / "manifest.json").read_text())["manifest"]
    for file, record in found["files"].items():
        for item in record["items"]:
            if item[0] == name:
                return file, item[4]
    raise KeyError(name)


def flipped_in(name: str) -> tuple[Callable[[Path], None], str]:
    """Damage to the values of an entry, and what is said of it."""

    def damage(folder: Path) -> None:
        file, position = values_of(folder, name)
        flip(folder / file, position + 1)

    return damage, rf"distcp is damaged: bytes .* {re.escape(name)}"


def flip_the_middle(path: Path) -> None:
    flip(path, path.stat().st_size // 2)


def of_version(folder: Path, version: int) -> None:
    path = folder / "manifest.json"
    inner = json.loads(path.read_text())["manifest"]
    body = json.dumps({**inner, "version": version, "something": "new"})
    path.write_text(f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}')


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a bit of a parameter": flipped_in("model.0.weight"),
    "a bit of a vector": flipped_in("model.1.bias"),
    "a bit of optimizer state": flipped_in("optimizer.state.0.weight.exp_avg"),
    "a bit of extra": flipped_in("extra"),
    "a bit of the manifest": (lambda c: flip_the_middle(c / "manifest.json"), "manifest.json is damaged"),
    "a bit of the metadata": (lambda c: flip_the_middle(c / ".metadata"), ".metadata is damaged"),
    "a file cut off": (lambda c: os.truncate(c / "__1_0.distcp", 2000), r"__1_0\.distcp is damaged: bytes .* model\."),
    "a file missing": (lambda c: (c / "__1_0.distcp").unlink(), r"__1_0\.distcp is missing, with model\."),
    "no manifest": (lambda c: (c / "manifest.json").unlink(), r"manifest\.json is missing"),
    "no metadata": (lambda c: (c / ".metadata").unlink(), r"\.metadata is missing"),
    "a newer format": (
        lambda c: of_version(c, 2),
        r"manifest\.json has format version 2, .*Upgrade torch-shard-engine",
    ),
}
SELDOM = ("a bit of a vector", "a bit of extra", "a bit of the metadata")


@pytest.mark.parametrize("what", quick(DAMAGE, [what for what in DAMAGE if what not in SELDOM]))
@ranks(2)
def test_damage_is_found_with_file_and_parameter(what, rank, tmp_path):
    refused(rank, tmp_path, *DAMAGE[what])


@ranks(2)
def test_files_of_two_checkpoints(rank, tmp_path):
    _model, engine, optimizer = build(model=wide)
    save(engine, tmp_path / "a", optimizer)
    save(engine, tmp_path / "b", optimizer)
    if rank == 0:
        shutil.copy(tmp_path / "a" / ".metadata", tmp_path / "b" / ".metadata")
    dist.barrier()
    with pytest.raises(CheckpointError, match="damaged"):
        load(engine, tmp_path / "b", optimizer)


@ranks(2)
def test_a_bomb_in_the_metadata_is_not_touched_off(rank, tmp_path, monkeypatch):
    def damage(folder: Path) -> None:
        (folder / "manifest.json").unlink()  # whoever builds a bomb leaves out what would find it
        write_metadata(folder, {"state_dict_metadata": Bomb()})

    monkeypatch.chdir(tmp_path)
    refused(rank, tmp_path, damage, r"\.metadata asks for (posix|os)\.system")
    assert "exploded" not in files_of(tmp_path)


@ranks(2)
def test_a_bomb_in_an_object_is_not_touched_off(rank, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dcp.save({"model": wide().state_dict(), "extra": Bomb()}, checkpoint_id=tmp_path / "c")
    before = files_of(tmp_path)
    _model, engine, _ = build(model=wide)
    with pytest.raises(CheckpointError, match=r"extra was refused.*(posix|os)\.system"):
        load(engine, tmp_path / "c")
    assert files_of(tmp_path) == before


def cut_off(folder: Path) -> None:
    info = metadata_of(folder).storage_data[MetadataIndex("model.0.weight", torch.Size((0, 0)))]
    os.truncate(folder / info.relative_path, info.offset + info.length // 2)


def without_a_part(folder: Path) -> None:
    """Nothing would be read to its place, which would keep what memory held."""
    metadata = metadata_of(folder)
    metadata.state_dict_metadata["model.0.weight"].chunks.pop()
    write_metadata(folder, metadata)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_off, r"distcp is damaged or missing: model\.0\.weight"),
        (without_a_part, r"model\.0\.weight is not complete"),
    ],
)
@ranks(2)
def test_damage_to_a_checkpoint_of_torchs(damage, said, rank, tmp_path):
    """It has no checksums that torch would look at, so that a flipped bit can't be found."""
    dcp.save({"model": wide().state_dict()}, checkpoint_id=tmp_path / "c")
    if rank == 0:
        damage(tmp_path / "c")
    dist.barrier()
    _model, engine, _ = build(model=wide)
    before = whole(engine)
    with pytest.raises(CheckpointError, match=said):
        load(engine, tmp_path / "c")
    same(whole(engine), before)


@ranks(2)
def test_no_checkpoint(rank, tmp_path):
    _model, engine, _ = build(model=wide)
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        load(engine, tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        load(engine, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        load(engine, tmp_path / "file")


# -- another model ----------------------------------------------------------------------------------------------------


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 9)
        self.more = nn.Linear(2, 2)
        del self.frozen


@ranks(2)
def test_everything_that_does_not_fit_is_listed(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    engine.save(tmp_path / "c", optimizer)
    engine.save_full(tmp_path / "c.pt", optimizer)
    _again, other, second = build(seed=1, model=Other)
    before = whole(other, second)
    for file in ("c", "c.pt"):
        with pytest.raises(StateDictError) as caught:
            load(other, tmp_path / file, second)
        lines = str(caught.value).splitlines()
        assert "more.weight" in lines[1] and "more.bias" in lines[1] and lines[1].strip().startswith("missing")
        assert "frozen" in lines[2] and lines[2].strip().startswith("unexpected")
        # State in a file is by number, and goes to the parameter of that number.
        given = "head.bias" if file == "c" else "more.bias"
        for text in (
            "size mismatch for head.weight",
            "size mismatch for head.bias",
            f"optimizer: {given}: exp_avg has shape",
        ):
            assert text in str(caught.value), str(caught.value)
        same(whole(other, second), before)


@ranks(2)
def test_another_optimizer(rank, tmp_path):
    model, engine, optimizer = build(model=Net)
    train(model, optimizer, rank, range(1))
    engine.save(tmp_path / "model")
    engine.save(tmp_path / "c", optimizer)
    engine.save_full(tmp_path / "c.pt", optimizer)
    with pytest.raises(StateDictError, match="missing: optimizer"):
        load(engine, tmp_path / "model", optimizer)
    one = torch.optim.AdamW(model.parameters())
    for file in ("c", "c.pt"):
        with pytest.raises(StateDictError, match="2 parameter groups where the optimizer has 1"):
            load(engine, tmp_path / file, one)
        assert not one.state
        load(engine, tmp_path / file)
    with pytest.raises(StateDictError, match="no such optimizer state"):
        load(engine, tmp_path / "c.pt", {"one": optimizer})


@ranks(2)
def test_one_rank_alone_has_another_model(rank, tmp_path):
    """What one rank finds, all ranks hear of."""
    _model, engine, optimizer = build(model=Net)
    save(engine, tmp_path / "c", optimizer)
    before = whole(engine, optimizer)
    if rank == 1:
        optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateDictError, match="failed on rank 1" if rank == 0 else "unexpected"):
        load(engine, tmp_path / "c", optimizer)
    same(whole(engine), {"model": before["model"]})


# -- where nothing can be written -------------------------------------------------------------------------------------


def not_saved(rank: int, path: Path | str, match: str) -> None:
    model, engine, optimizer = build(model=wide, make=adamw)
    model(torch.ones(2, 600)).sum().backward()
    optimizer.step()
    before = whole(engine, optimizer)
    with pytest.raises(CheckpointError, match=match):
        save(engine, path, optimizer)
    dist.barrier()  # rank 0 tidies up
    same(whole(engine, optimizer), before)
    optimizer.step()


@ranks(2)
def test_a_path_below_a_file(rank, tmp_path):
    if rank == 0:
        (tmp_path / "file").touch()
    dist.barrier()
    not_saved(rank, tmp_path / "file" / "c", "Not a directory|File exists")


@ranks(2)
def test_a_path_that_the_ranks_do_not_share_is_found_before_writing(rank, tmp_path, monkeypatch):
    (tmp_path / str(rank)).mkdir()
    monkeypatch.chdir(tmp_path / str(rank))
    not_saved(rank, "/proc/self/cwd/c", "rank 1 does not see .* don't share this path")
    dist.barrier()
    assert files_of(tmp_path / "0") == files_of(tmp_path / "1") == []


@ranks(2)
def test_a_full_disk(rank, tmp_path):
    """On one rank; the checkpoint of before stays."""
    _model, engine, optimizer = build(model=wide)
    save(engine, tmp_path / "c", optimizer)
    with full_disk(100_000) if rank == 1 else contextlib.nullcontext():
        not_saved(rank, tmp_path / "c", r"File too large: '.*__1_0\.distcp'")
    assert files_of(tmp_path) == ["c"]
    before = whole(engine, optimizer)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), before)


@ranks(2)
def test_what_is_no_checkpoint_is_not_replaced(rank, tmp_path):
    if rank == 0:
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "thesis.tex").touch()
        (tmp_path / "file").touch()
    dist.barrier()
    not_saved(rank, tmp_path / "work", r"exists and holds no checkpoint \(thesis\.tex\)")
    not_saved(rank, tmp_path / "file", "is a file")
    assert files_of(tmp_path) == ["file", "work"] and files_of(tmp_path / "work") == ["thesis.tex"]
