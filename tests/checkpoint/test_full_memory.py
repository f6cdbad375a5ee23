"""Full checkpoints are never whole in memory: peaks of anonymous memory, measured while they are written and loaded."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks

UNIT = 4 << 20
UNITS = 12

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup")


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


class Peak:
    """The highest value above that at the beginning."""

    def __init__(self) -> None:
        self.bytes = 0


@contextlib.contextmanager
def peak() -> Iterator[Peak]:
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    found, stop, base = Peak(), threading.Event(), anonymous()

    def look() -> None:
        while not stop.wait(0.0005):
            found.bytes = max(found.bytes, anonymous() - base)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


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
    found = {}
    with peak() as found["save torch"]:
        engine.save_full(tmp_path / "c.pt", optimizer)
    with peak() as found["save low"]:
        engine.save_full(tmp_path / "low.pt", dtype=torch.bfloat16)
    with peak() as found["save safetensors"]:
        engine.save_full(tmp_path / "c", max_shard_size=UNIT)
    with peak() as found["load torch"]:
        engine.load(tmp_path / "c.pt")
    with peak() as found["load low"]:
        engine.load(tmp_path / "low.pt", dtype=torch.float32)
    with peak() as found["load safetensors"]:
        engine.load(tmp_path / "c")
    with peak() as found["load optimizer"]:
        engine.load(tmp_path / "c.pt", optimizer)
    optimizer.state.clear()
    with peak() as found["load new optimizer"]:
        engine.load(tmp_path / "c.pt", optimizer)
    print({name: round(v.bytes / UNIT, 2) for name, v in found.items()})
    units = {name: round(value.bytes / UNIT, 2) for name, value in found.items()}
    assert units["save torch"] <= 1.5, units
    assert units["save low"] <= 2, units
    assert units["save safetensors"] <= 1.5 + (1 if rank == 0 else 0), units  # and one output file
    assert units["load torch"] <= 1, units
    assert units["load low"] <= 1, units
    assert units["load safetensors"] <= 1, units
    assert units["load optimizer"] <= 1, units
    assert units["load new optimizer"] <= UNITS / 2 + 1, units  # this rank's state, which stays
