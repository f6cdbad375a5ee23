"""A checkpoint of format version 1 stays here for ever, and every version reads it.

``python -m tests.checkpoint.test_format FOLDER`` writes one, on two ranks.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

import torch_shard
from tests.checkpoint.helpers import load, same, save, whole
from tests.support.ranks import close_all, ranks, run
from torch_shard.checkpoint.tools.verify import verify

KEPT = Path(__file__).parent / "format_1"


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 3)
        self.two = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))


def numbers(value: torch.Tensor, first: int) -> torch.Tensor:
    """What each tensor holds: no random numbers, which another torch may draw otherwise."""
    return torch.arange(first, first + value.numel()).view(value.shape).to(value.dtype) / 4


def expected() -> tuple[Small, torch.optim.Optimizer]:
    model = Small()
    optimizer = torch.optim.AdamW([{"params": model.one.parameters()}, {"params": [model.scale], "lr": 0.5}], lr=0.25)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(numbers(p, i))
        model.count.copy_(torch.tensor([3, 1, 2]))
    for i, p in enumerate([*model.one.parameters(), model.scale]):
        optimizer.state[p] = {
            "step": torch.tensor(7.0),
            "exp_avg": numbers(p.detach(), 10 + i),
            "exp_avg_sq": numbers(p.detach(), 20 + i),
        }
    return model, optimizer


def write(rank: int, world_size: int, path: str) -> None:
    model, optimizer = expected()
    engine = torch_shard.shard(model, unit_bytes=1)
    save(engine, path, optimizer, extra={"epoch": 3, "losses": [0.5, 0.25]})


@ranks(1, 2, 3)
def test_format_1_loads(tmp_path, rank):
    model, optimizer = expected()
    engine = torch_shard.shard(model)
    wanted = whole(engine, optimizer)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.count.zero_()
    optimizer.state.clear()
    assert load(engine, KEPT, optimizer) == {"epoch": 3, "losses": [0.5, 0.25]}
    same(whole(engine, optimizer), wanted)


def test_the_present_version_still_writes_what_it_reads(tmp_path):
    run(2, write, str(tmp_path / "c"))
    now, kept = (json.loads((p / "manifest.json").read_text())["manifest"] for p in (tmp_path / "c", KEPT))
    assert now["version"] == kept["version"] == 1
    assert set(kept) <= set(now)
    assert now["units"] == kept["units"] and now["parameters"] == kept["parameters"]


def problems_of(folder: Path) -> list[str]:
    return [str(problem) for problem in verify(folder)]


def test_any_flipped_bit_is_found_by_verifying(tmp_path):
    folder = tmp_path / "c"
    shutil.copytree(KEPT, folder)
    assert problems_of(folder) == []
    generator = random.Random(0)
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for _ in range(25):
            bad = bytearray(good)
            bad[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
            path.write_bytes(bad)
            assert any(path.name in text for text in problems_of(folder)), path
        path.write_bytes(good)


if __name__ == "__main__":
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    run(2, write, sys.argv[1])
    close_all()
