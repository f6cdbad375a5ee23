"""One training with everything that a checkpoint holds, to be interrupted and resumed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate_shard import ShardPlugin
from tests.accelerate.support.models import Net, loader
from tests.accelerate.support.training import full_parameters

__all__ = ["Counter", "Noisy", "Run", "differ", "plugin"]


class Noisy(Net):
    """A classifier with dropout and tied layers, so that random states and ties count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].linear.weight = self.layers[0].linear.weight
        self.dropout = nn.Dropout(0.2)
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


def differ(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """The names, which are the same, of tensors that are not equal."""
    assert found.keys() == wanted.keys()
    return [name for name, value in wanted.items() if not torch.equal(found[name], value)]
