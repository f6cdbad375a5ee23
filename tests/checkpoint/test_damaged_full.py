"""A byte of a torch file that changed after it was written is found before anything is loaded."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.checkpoint.helpers import build, same, train, whole
from tests.support.ranks import ranks
from torch_shard.errors import CheckpointError


def flip(path: Path, member: str) -> None:
    """Change the last byte of a member of an archive."""
    with zipfile.ZipFile(path) as archive:
        found = archive.getinfo(member)
        last = archive.getinfo(member).header_offset + 30 + len(member) + found.file_size - 1
        with open(path, "rb") as file:  # the extra field of the member's own header may differ from the directory's
            file.seek(found.header_offset + 28)
            last += int.from_bytes(file.read(2), "little")
    with open(path, "r+b") as file:
        file.seek(last)
        byte = file.read(1)[0]
        file.seek(last)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("writer", ["engine.save_full", "torch.save"])
@ranks(2)
def test_a_flipped_bit_of_any_tensor_or_of_what_names_them_is_refused_with_nothing_changed(rank, writer, tmp_path):
    model, engine, optimizer = build()
    train(model, optimizer, rank, range(1))
    path = tmp_path / "file.pt"
    if writer == "engine.save_full":
        engine.save_full(path, optimizer)
    else:
        full = {"model": engine.state_dict(rank0_only=False), "optimizer": engine.optim_state_dict(optimizer)}
        torch.save(full, path) if rank == 0 else None
    dist.barrier()
    with zipfile.ZipFile(path) as archive:
        members = [info.filename for info in archive.infolist() if "/data/" in info.filename and info.file_size]
        (pickled,) = (info.filename for info in archive.infolist() if info.filename.endswith("data.pkl"))
    train(model, optimizer, rank, range(1))
    before = whole(engine, optimizer)
    for member in (members[0], members[len(members) // 2], members[-1], pickled):
        dist.barrier()
        flip(path, member) if rank == 0 else None
        dist.barrier()
        with pytest.raises(CheckpointError, match=rf"file\.pt is damaged .*{member}"):
            engine.load(path, optimizer)
        same(whole(engine, optimizer), before)
        dist.barrier()
        flip(path, member) if rank == 0 else None
    dist.barrier()
    engine.load(path, optimizer)


@ranks(2)
def test_a_file_that_torch_wrote_without_checksums_loads(rank, tmp_path):
    model, engine, _ = build()
    full = engine.state_dict(rank0_only=False)
    if rank == 0:
        torch.serialization.set_crc32_options(False)
        torch.save(full, tmp_path / "file.pt")
        torch.serialization.set_crc32_options(True)
    dist.barrier()
    torch.nn.init.zeros_(next(model.parameters()))
    engine.load(tmp_path / "file.pt")
    same(engine.state_dict(rank0_only=False), full)
