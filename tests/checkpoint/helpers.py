"""A model with everything that a checkpoint has to keep, its training, and comparison of whole states to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torch_shard
from tests.support.odd_model import Net, batch
from torch_shard.checkpoint import load, save


class Model(nn.Module):
    """Odd parameters, buffers (one that is not saved) and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("mask", torch.arange(4).bool())
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(ids).flatten(0, 1))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


Maker = Callable[[nn.Module], Any]


def build(
    seed: int = 0, make: Maker = adamw, model: Callable[[], nn.Module] = Model, **config: Any
) -> tuple[nn.Module, torch_shard.Engine, Any]:
    """A sharded model, its engine and its optimizer."""
    torch.manual_seed(seed)
    made = model()
    engine = torch_shard.shard(made, **{"unit_bytes": 256, "timeout": 20.0, **config})
    return made, engine, make(made)


def alone(model: Callable[[], nn.Module] = Net, seed: int = 0, **config: Any) -> tuple[nn.Module, torch_shard.Engine]:
    """A sharded model without an optimizer, and its engine."""
    made, engine, _ = build(seed, lambda m: None, model, **config)
    return made, engine


def train(model: nn.Module, optimizer: Any, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(batch(rank + step)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(engine: torch_shard.Engine, optimizer: Any = None) -> dict[str, Any]:
    """Everything as plain tensors, on every rank. Collective."""
    found: dict[str, Any] = {"model": dict(engine.state_dict(rank0_only=False))}
    if optimizer is not None:
        found["optimizer"] = engine.optim_state_dict(optimizer, rank0_only=False)
    return found


def comes_back(
    path: Path, engine: torch_shard.Engine, optimizer: Any = None, **config: Any
) -> tuple[nn.Module, Any, Any]:
    """Load a checkpoint into another start, compare it with what was saved, and return model, engine and optimizer."""
    if optimizer is None:
        config["make"] = lambda model: None
    made, other, second = build(seed=1, **config)
    load(other, path, second)
    same(whole(other, second), whole(engine, optimizer))
    return made, other, second


def same(found: Any, wanted: Any, where: str = "") -> None:
    """Assert that nested values are equal to the bit, kinds included."""
    if isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor and found.dtype == wanted.dtype and found.shape == wanted.shape, where
        assert torch.equal(bits(found), bits(wanted)), where
    elif isinstance(wanted, dict):
        assert sorted(map(str, found)) == sorted(map(str, wanted)), where
        for key, value in wanted.items():
            same(found[key], value, f"{where}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert type(found) is type(wanted) and len(found) == len(wanted), where
        for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
            same(one, other, f"{where}[{i}]")
    else:
        assert type(found) is type(wanted) and found == wanted, (where, found, wanted)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def saved_by(rank: int, world_size: int, path: str, config: dict[str, Any], steps: int = 2) -> None:
    """Train, save a checkpoint, a full one, and what they must hold beside them."""
    model, engine, optimizer = build(**config)
    train(model, optimizer, rank, range(steps))
    model.note = "trained"
    save(engine, path, optimizer, extra={"step": steps})
    engine.save_full(path + ".pt", optimizer, extra={"step": steps})
    expected = whole(engine, optimizer)
    if rank == 0:
        torch.save(expected, path + ".expected")
    engine.close()


def loads(rank: int, world_size: int, path: str, config: dict[str, Any]) -> None:
    """Load a checkpoint into another start, and compare."""
    expected = torch.load(path.removesuffix(".pt") + ".expected", weights_only=True)
    model, engine, optimizer = build(seed=1, **config)
    train(model, optimizer, rank, range(1))
    assert load(engine, path, optimizer) == {"step": 2}
    found = whole(engine, optimizer)
    same(found, expected)
    for name, state in expected["optimizer"]["state"].items():
        assert list(found["optimizer"]["state"][name]) == list(state), name
    assert model.note == "trained"
    train(model, optimizer, rank, range(1))
    engine.close()


def files_of(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())
