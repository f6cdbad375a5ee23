"""One training with everything that a checkpoint holds, to be interrupted and resumed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import Layer, full_parameters, loader

__all__ = ["Counter", "Noisy", "Run", "folder_of", "plugin"]


class Noisy(nn.Module):
    """A classifier with dropout and tied layers, so that random states and ties count."""

    def __init__(self, features: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.embed = nn.Linear(features, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.layers[1].linear.weight = self.layers[0].linear.weight
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        x = self.embed(x)
        for layer in self.layers:
            x = self.dropout(layer(x))
        return self.head(x)


class Counter:
    """A custom object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@dataclass
class Run:
    """A training under an Accelerator, which goes on from where it is with each call of :meth:`train`."""

    accelerator: Any
    seed: int = 0
    size: int = 24
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        model = Noisy()
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 0.01},
            ],
            lr=0.02,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader(self.size, 4))
        self.model, self.optimizer, self.schedule, self.data = prepared
        self.custom = Counter()
        self.accelerator.register_for_checkpointing(self.custom)
        torch.manual_seed(100 + self.accelerator.process_index)

    def train(self, skip: int = 0, steps: int = 99) -> list[float]:
        """One pass over the data, from its batch `skip` on, for so many steps; the losses."""
        data = self.accelerator.skip_first_batches(self.data, skip) if skip else self.data
        found = []
        for number, (x, y) in enumerate(data):
            if number == steps:
                break
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y) * (1 + random.random())
                self.accelerator.backward(loss)
                self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.custom.count += 1
            found.append(loss.item())
        self.losses += found
        return found

    def state(self) -> dict[str, Any]:
        """Whole parameters and buffers, and what else has been trained. Collective."""
        inner = self.accelerator.unwrap_model(self.model)
        return {
            **full_parameters(inner),
            "seen": inner.seen.clone(),
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "custom": self.custom.count,
            "last_epoch": self.schedule.scheduler.last_epoch,
        }


def plugin(form: str = "sharded", **options: Any) -> ShardPlugin:
    return ShardPlugin(state_dict_type=form, **options)  # type: ignore[arg-type]


def folder_of(tmp: Any, name: str = "checkpoint") -> str:
    return str(tmp / name)
