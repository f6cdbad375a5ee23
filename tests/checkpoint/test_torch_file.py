"""Torch files that are written value by value: plain torch.load and unzip find nothing unusual in them."""

from __future__ import annotations

import collections
import contextlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.helpers import same
from torch_shard.checkpoint.format.torch_file import Slot, TorchFileWriter, check_loadable
from torch_shard.errors import CheckpointError, ConfigError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
]  # fmt: skip


def written(path: Path, values: Any) -> Any:
    """Write a list of tensors, the last one first; what plain torch loads."""
    slots = [Slot(value.shape, value.dtype) for value in values]
    with contextlib.closing(TorchFileWriter(path, slots)) as writer:
        for slot, value in reversed(list(zip(slots, values, strict=True))):
            writer.write(slot, value)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(dtype, tmp_path):
    values = [torch.arange(24).view(shape).to(dtype) for shape in ((24,), (2, 3, 4), (1, 24))]
    values += [torch.zeros((), dtype=dtype), torch.empty(0, 4, dtype=dtype), values[1].permute(2, 0, 1)]
    same(written(tmp_path / "c.pt", values), values)


@pytest.mark.exhaustive
def test_values_are_in_torch_s_own_places(tmp_path):
    """torch can compute where values are, and is told here to make sure that this is where they are."""
    written(tmp_path / "c.pt", [torch.arange(1000.0), torch.empty(0), torch.ones(3), torch.ones(7, dtype=torch.bool)])
    code = (
        "import sys, torch; from torch.utils.serialization import config; config.load.calculate_storage_offsets = True; "
        "found = torch.load(sys.argv[1], mmap=True, weights_only=True); assert found[0].sum() == 499500 and found[3].all(); "
        "assert not any(name.startswith('torch_shard') for name in sys.modules)"
    )
    environment = {**os.environ, "TORCH_SERIALIZATION_DEBUG": "1"}
    # Without this package, and in another folder than the repository.
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "c.pt")], check=True, cwd=tmp_path, env=environment)


def test_checksums_are_right_and_values_aligned(tmp_path):
    written(tmp_path / "c.pt", [torch.randn(5), torch.randn(3 << 20), torch.ones(1)])
    archive = zipfile.ZipFile(tmp_path / "c.pt")
    assert archive.testzip() is None
    mapped = torch.load(tmp_path / "c.pt", mmap=True, weights_only=True)
    assert all(value.data_ptr() % 64 == 0 for value in mapped)


def test_structures_keep_their_kinds_and_attributes(tmp_path):
    slot = Slot(torch.Size((2,)), torch.float32)
    state = collections.OrderedDict(a=slot, b=slot)
    state._metadata = collections.OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    real = torch.arange(3)
    contents = {
        "model": state,
        "list": [1, (2.5, "x", None, True), {3: b"raw"}, set()],
        "real": [real, real, real.view(3, 1), torch.eye(3).to_sparse(), nn.Parameter(torch.ones(2))],
    }
    with contextlib.closing(TorchFileWriter(tmp_path / "c.pt", contents)) as writer:
        writer.write(slot, torch.ones(2))
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert type(found["model"]) is collections.OrderedDict and found["model"]._metadata == {"": {"version": 1}}
    assert found["model"]["a"].data_ptr() == found["model"]["b"].data_ptr()
    assert found["list"] == contents["list"]
    same(found["real"][:2], [real, real])
    assert found["real"][0].data_ptr() == found["real"][1].data_ptr()
    assert torch.equal(found["real"][3].to_dense(), torch.eye(3))
    assert isinstance(found["real"][4], nn.Parameter)
    assert torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)["model"]["a"].tolist() == [1.0, 1.0]


def test_a_slot_is_written_once_and_with_what_it_stands_for(tmp_path):
    slot, other = Slot(torch.Size((2,)), torch.float32), Slot(torch.Size((2,)), torch.float32)
    writer = TorchFileWriter(tmp_path / "c.pt", [slot])
    for wrong in (torch.ones(3), torch.ones(2, dtype=torch.float64)):
        with pytest.raises(ConfigError, match="was given a tensor"):
            writer.write(slot, wrong)
    with pytest.raises(ConfigError, match="not in the file's structure"):
        writer.write(other, torch.ones(2))
    with pytest.raises(ConfigError, match="1 slots were not written"):
        writer.close()
    writer.write(slot, torch.ones(2))
    with pytest.raises(ConfigError, match="written before"):
        writer.write(slot, torch.ones(2))
    writer.close()


class Own:
    pass


@pytest.mark.parametrize("value", [Own(), [1, {"a": Own()}], lambda: 0, nn.Linear(1, 1)])
def test_what_would_not_be_loaded_is_refused(value):
    with pytest.raises(CheckpointError, match=r"extra can't be saved.*add_safe_globals"):
        check_loadable(value, "extra")


def test_allowed_classes_are_not_refused():
    with torch.serialization.safe_globals([Own]):
        check_loadable({"a": Own()}, "extra")


@pytest.mark.exhaustive
def test_more_than_four_gigabytes(tmp_path, monkeypatch):
    """Sizes and places that need 64 bits."""
    large, last = torch.Size(((1 << 32) // 4 + 16,)), torch.arange(5.0)
    slots = [Slot(shape, torch.float32) for shape in (last.shape, large, last.shape, last.shape)]
    with contextlib.closing(TorchFileWriter(tmp_path / "c.pt", slots)) as writer:
        for slot in slots:
            # What is untouched takes no memory.
            writer.write(slot, last if slot.shape == last.shape else torch.empty(large))
    monkeypatch.setenv("TORCH_SERIALIZATION_DEBUG", "1")
    settings = torch.utils.serialization.config.load  # which monkeypatch can't restore
    before = settings.calculate_storage_offsets
    for computed in (False, True):
        settings.calculate_storage_offsets = computed
        try:
            found = torch.load(tmp_path / "c.pt", weights_only=True, mmap=True)
        finally:
            settings.calculate_storage_offsets = before
        assert torch.equal(found[2], last) and torch.equal(found[3], last) and found[1].shape == large
    assert zipfile.ZipFile(tmp_path / "c.pt").read("archive/data/3") == last.numpy().tobytes()
    os.unlink(tmp_path / "c.pt")
