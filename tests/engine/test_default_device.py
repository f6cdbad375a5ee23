"""torch's default device is the user's: the engine makes none of its own tensors there."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of
from tests.support.ranks import ranks


def trained(device: str, rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights after steps, clipping, a checkpoint of each form, and a step after each was loaded."""
    torch.manual_seed(0)
    model: nn.Module = MLP().double()
    engine = torch_shard.shard(model, unit_bytes=300)
    batches = [batch(rank, number) for number in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        loss_of(model(batches[number])).backward()
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    with torch.device(device):
        for number in range(2):
            step(number)
        with engine.gathered(write=True, grads=True):
            model.head.bias.data.mul_(0.5)
        engine.save(folder / "sharded", optimizer)
        engine.save_full(folder / "full.pt", optimizer)
        step(2)
        engine.load(folder / "sharded", optimizer)
        step(3)
        engine.load(folder / "full.pt", optimizer)
        step(4)
    return engine.state_dict(rank0_only=False)


@ranks(2)
def test_training_and_checkpoints_are_the_same_under_another_default_device(rank: int, tmp_path: Path) -> None:
    found = [trained(device, rank, tmp_path / device) for device in ("cpu", "meta")]
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
