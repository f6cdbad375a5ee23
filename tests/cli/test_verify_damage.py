"""verify: damage of kinds that make readers stumble, and indices of safetensors that have lost entries."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from torch_shard.checkpoint.format.dcp_metadata import load_metadata


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
    with open(folder / ".metadata", "rb") as file:
        metadata = load_metadata(file, "")
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
    from tests.checkpoint.test_bad_files import Bomb

    folder = copied("titan")
    info = _entry(folder, "train_state.step")
    path = folder / info.relative_path
    good = path.read_bytes()
    with open(folder / ".metadata", "rb") as file:
        metadata = load_metadata(file, "")
    for content, expected in ((Bomb(), 0), (None, 1)):
        made = io.BytesIO()
        torch.save(content, made)
        data = made.getvalue()
        if content is None:
            data = _with_pickle(data, b"\x80\x02X no pickle")
        path.write_bytes(good + data)
        index = next(i for i in metadata.storage_data if i.fqn == "train_state.step")
        metadata.storage_data[index].offset, metadata.storage_data[index].length = len(good), len(data)
        with open(folder / ".metadata", "wb") as file:
            pickle.dump(metadata, file)
        found = cli("verify", folder, "--json", expected=expected)["problems"]
        assert [problem["entries"] for problem in found] == ([["train_state.step"]] if expected else [])


def _with_pickle(archive: bytes, content: bytes) -> bytes:

    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.infolist():
            new.writestr(member.filename, content if member.filename.endswith("data.pkl") else old.read(member))
    return made.getvalue()
