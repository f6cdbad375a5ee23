"""Entries that are written without torch.save are what torch.save writes, and checksums what zlib says."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
import zlib

import pytest
import torch

from tests.checkpoint.helpers import bits
from torch_shard.checkpoint.format import tensor_entry
from torch_shard.checkpoint.format.archive import ALIGNMENT
from torch_shard.checkpoint.format.tensor_entry import crc_of_part, tensor_blob

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint16,
    torch.uint8,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (2, 1, 4)], ids=str)
def test_torch_loads_it(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    made = tensor_blob(value.shape, dtype)
    raw = bytes(bits(value).tolist())
    assert len(made.head) % ALIGNMENT == 0 and len(raw) == made.nbytes
    file = io.BytesIO(made.head + raw + made.tail(zlib.crc32(raw)))
    found = torch.load(file, weights_only=True)
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(bits(found), bits(value))
    archive = zipfile.ZipFile(file)
    assert archive.testzip() is None
    theirs = io.BytesIO()
    torch.save(value, theirs)
    assert sorted(archive.namelist()) == sorted(zipfile.ZipFile(theirs).namelist())


def test_large_tensors_get_the_wide_fields():
    """Over 4 GiB: only what surrounds the values is made, and read with a reader that skips them."""
    made = tensor_blob(torch.Size((1 << 30, 5)), torch.uint8)
    tail = made.tail(7)
    assert made.nbytes == 5 << 30
    end = tail.rindex(b"PK\5\6")
    wide = tail.rindex(b"PK\6\6")
    count, size, start = struct.unpack("<QQQ", tail[wide + 32 : wide + 56])
    assert count == len(zipfile.ZipFile(io.BytesIO(small())).namelist())
    assert start + size == len(made.head) + made.nbytes + wide and end > wide
    at = len(tail) - (len(made.head) + made.nbytes + len(tail) - start)
    entries = []
    for _ in range(count):
        assert tail[at : at + 4] == b"PK\1\2"
        crc, packed, plain, path, extra = struct.unpack("<IIIHH", tail[at + 16 : at + 32])
        offset = struct.unpack("<I", tail[at + 42 : at + 46])[0]
        name = tail[at + 46 : at + 46 + path].decode()
        fields = tail[at + 46 + path : at + 46 + path + extra]
        entries.append((name, crc, packed, plain, offset, fields))
        at += 46 + path + extra
    data = next(e for e in entries if e[0] == "archive/data/0")
    assert data[1:4] == (7, 0xFFFFFFFF, 0xFFFFFFFF)
    assert struct.unpack("<HHQQ", data[5]) == (1, 16, made.nbytes, made.nbytes)
    version = next(e for e in entries if e[0] == "archive/version")
    (position,) = struct.unpack("<Q", version[5][4:])
    position -= len(made.head) + made.nbytes
    assert tail[position : position + 4] == b"PK\3\4"


def small() -> bytes:
    made = tensor_blob(torch.Size((1,)), torch.uint8)
    return made.head + b"x" + made.tail(zlib.crc32(b"x"))


def test_the_checksum_of_a_part_follows_from_the_running_one():
    generator = random.Random(0)
    for _ in range(50):
        one, other = (os.urandom(generator.randrange(0, 3000)) for _ in range(2))
        assert crc_of_part(zlib.crc32(one), zlib.crc32(one + other), len(other)) == zlib.crc32(other)
    assert tensor_entry._power.cache_info().currsize <= 4096
