"""A whole training in bf16 beside DDP's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard import Precision, norms_in

BF16 = torch.bfloat16
STEPS, TAIL = 200, 50


def losses(rank: int, world_size: int, seed: int, engine: str) -> list[float]:
    """Of a small GPT on the text of a module of the standard library; the mean over the ranks."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    try:
        from gpt import GPT, GPTConfig
    finally:
        sys.path.pop(0)
    import argparse as text

    data = torch.tensor(list(Path(text.__file__).read_bytes()))
    torch.manual_seed(seed)
    model: nn.Module = GPT(GPTConfig(layers=2, width=32, heads=2, context=32, vocab=256))
    autocast = engine != "shard"
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        precision = Precision(param_dtype=BF16, keep=norms_in(model) if autocast else (), cast_inputs=not autocast)
        torch_shard.shard(model, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for _ in range(STEPS):
        starts = torch.randint(len(data) - 33, (8,), generator=generator).tolist()
        rows = torch.stack([data[start : start + 33] for start in starts])
        with torch.autocast("cpu", BF16, enabled=autocast):
            loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float() / world_size
        torch.distributed.all_reduce(mean)
        found.append(mean.item())
    return found


@pytest.mark.exhaustive
@ranks(2, timeout=300)
def test_the_loss_over_200_steps_differs_less_from_ddps_than_ddps_seeds_do(rank, world_size):
    def end(curve: list[float]) -> float:
        return sum(curve[-TAIL:]) / TAIL

    ddp = [losses(rank, world_size, seed, "ddp") for seed in range(3)]
    spread = max(map(end, ddp)) - min(map(end, ddp))
    assert end(ddp[0]) < 0.75 * ddp[0][0]  # it learns
    for engine in ("shard", "autocast"):
        curve = losses(rank, world_size, 0, engine)
        assert abs(end(curve) - end(ddp[0])) < spread, (engine, end(curve), [*map(end, ddp)])
        assert max(abs(a - b) for a, b in zip(curve, ddp[0], strict=True)) < max(
            abs(a - b) for a, b in zip(ddp[1], ddp[0], strict=True)
        )
