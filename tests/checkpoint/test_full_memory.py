"""Full checkpoints are never whole in memory: peaks of anonymous memory, measured while they are written and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.peak_memory import peak
from tests.support.ranks import ranks

UNIT = 4 << 20
UNITS = 12

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")


def blocks(seed: int) -> tuple[nn.Module, torch_shard.Engine, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    width = 1024
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(UNITS)))
    engine = torch_shard.shard(model, unit_bytes=UNIT, timeout=60.0)
    assert len(engine.units) == UNITS
    return model, engine, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.exhaustive
@ranks(2)
def test_no_rank_holds_the_whole_model_or_optimizer(rank, tmp_path):
    model, engine, optimizer = blocks(0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    engine.save_full(tmp_path / "c.pt", optimizer)  # what is imported and connected the first time
    engine.save_full(tmp_path / "c", max_shard_size=UNIT)
    limits = {
        "save torch": (lambda: engine.save_full(tmp_path / "c.pt", optimizer), 1.5),
        "save low": (lambda: engine.save_full(tmp_path / "low.pt", dtype=torch.bfloat16), 2),
        # On rank 0 and one output file.
        "save safetensors": (lambda: engine.save_full(tmp_path / "c", max_shard_size=UNIT), 1.5 + (rank == 0)),
        "load torch": (lambda: engine.load(tmp_path / "c.pt"), 1),
        "load low": (lambda: engine.load(tmp_path / "low.pt", dtype=torch.float32), 1),
        "load safetensors": (lambda: engine.load(tmp_path / "c"), 1),
        "load optimizer": (lambda: engine.load(tmp_path / "c.pt", optimizer), 1),
        # This rank's state, which stays.
        "load new optimizer": (lambda: engine.load(tmp_path / "c.pt", optimizer), UNITS / 2 + 1),
    }
    for what, (function, limit) in limits.items():
        if what == "load new optimizer":
            optimizer.state.clear()
        with peak() as found:
            function()
        assert round(found.bytes / UNIT, 2) <= limit, (what, found.bytes / UNIT)
