"""What is written in torch's format without torch.save: full files value by value, and what is around values in sharded ones."""

from __future__ import annotations

import collections
import contextlib
import io
import os
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.helpers import bits, same
from torch_shard.checkpoint.format.tensor_entry import ALIGNMENT, surroundings
from torch_shard.checkpoint.format.torch_file import Slot, TorchFileWriter, check_loadable
from torch_shard.errors import CheckpointError

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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (2, 1, 4)], ids=str)
def test_torch_loads_an_entry_of_a_sharded_file(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    head, tail = surroundings(value.shape, dtype)
    assert len(head) % ALIGNMENT == 0 or not value.numel()
    found = torch.load(io.BytesIO(head + bytes(bits(value).tolist()) + tail), weights_only=True)
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(bits(found), bits(value))


def test_surroundings_of_a_large_tensor_take_no_memory():
    """Where torch is told to fill new tensors, too."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)
    try:
        head, tail = surroundings(torch.Size((5 << 30,)), torch.uint8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(head) + len(tail) < 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
