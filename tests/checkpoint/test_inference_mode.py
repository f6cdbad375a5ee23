"""Checkpoints are loaded inside ``torch.inference_mode``, too, as evaluation hooks do it."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.support.ranks import ranks


@ranks(2)
def test_training_goes_on_behind_it(rank: int, world_size: int, tmp_path: Path) -> None:
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01))
    pair.step(plain_backward, batch(rank, 0))
    pair.engine.save(tmp_path / "saved", pair.optimizer)
    with torch.no_grad():
        for p in pair.model.parameters():
            p.zero_()
            pair.optimizer.state[p]["exp_avg"].zero_()
    with torch.inference_mode():
        pair.engine.load(tmp_path / "saved", pair.optimizer)
    for step in (1, 2):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
