"""The short training of ``accelerate-shard test``: each rank runs ``python -m accelerate_shard.cli.training PROCESSES``.

It checks that the ranks found each other, that they hold the same model after each step, that the loss falls, and in fp32 that
the training is that of one process without sharding.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_shard.log import logger

from ..accelerator import Accelerator
from ..settings.from_environment import launch_plugin
from ..settings.plugin import ShardPlugin

__all__ = ["main"]

_STEPS, _BATCH, _WIDTH, _CLASSES = 8, 4, 32, 8
_TOLERANCE = 1e-4  # relative; sums of another order, over some steps


class Block(nn.Module):
    """A residual layer of the small model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.linear = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Model(nn.Module):
    """A classifier with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def main(processes: int) -> int:
    """Train and compare. Collective.

    Returns:
        0 where all is well, else 1; the main process says why.
    """
    accelerator = _accelerator()
    if accelerator.num_processes != processes:
        print(
            f"test: {processes} processes were configured, and {accelerator.num_processes} found each other.",
            flush=True,
        )
        return 1
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(_STEPS, processes, _BATCH, _WIDTH)
    y = x[..., :_CLASSES].argmax(-1)
    wanted = _alone(model, x, y)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found, mistakes = [], []
    rank = accelerator.process_index
    for step in range(_STEPS):
        loss = nn.functional.cross_entropy(
            model(x[step, rank].to(accelerator.device)).float(), y[step, rank].to(accelerator.device)
        )
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        found.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        if not _same((norm, *_sums(model))):
            mistakes.append(f"the ranks differ after step {step + 1}")
            break
    # With fp16, the first steps may have been left out while the scale was found.
    if accelerator.mixed_precision == "no":
        off = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=False))
        if off > _TOLERANCE:
            mistakes.append(f"losses are off by {off:.1e} from those of one process")
    elif not found[-1] < found[0]:
        mistakes.append(f"the loss did not fall: {found[0]:.4f} to {found[-1]:.4f}")
    plugin = accelerator.shard_plugin
    if accelerator.is_main_process:
        where = (
            f"{processes} x {accelerator.device.type}, {plugin.strategy}, mixed precision {accelerator.mixed_precision}"
        )
        said = "; ".join(mistakes) or f"the ranks agree, loss {found[0]:.4f} to {found[-1]:.4f} in {len(found)} steps"
        print(f"test: {where}: {said}", flush=True)
    accelerator.end_training()
    return 1 if mistakes else 0


def _accelerator() -> Accelerator:
    chosen = launch_plugin() or ShardPlugin()
    # Names of the user's own model mean nothing in this one.
    plugin = dataclasses.replace(
        chosen, units=None, layer_classes=(), ignore=(), activation_checkpointing=bool(chosen.activation_checkpointing),
        activation_offload=bool(chosen.activation_offload),
    )  # fmt: skip
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would say that the launch's settings are not used
    try:
        return Accelerator(shard_plugin=plugin)
    finally:
        logger.setLevel(level)


def _alone(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The mean losses of the same training on whole batches, in this process alone."""
    copy = Model()
    copy.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(copy.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(len(x)):
        loss = nn.functional.cross_entropy(copy(x[step].flatten(0, 1)), y[step].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(copy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _sums(model: Any) -> list[float]:
    """A number for each parameter, whole."""
    import torch_shard

    engine = torch_shard.engine_of(model)
    assert engine is not None
    with engine.gathered():
        return [p.detach().double().square().sum().item() for p in model.parameters()]


def _same(values: tuple[float, ...]) -> bool:
    if not dist.is_initialized():
        return True
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return all(other == everyone[0] for other in everyone)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
