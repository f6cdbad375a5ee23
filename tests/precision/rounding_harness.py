"""Models, optimizers and comparisons for the tests of stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, whole
from torch_shard import Precision

BF16, FP32 = torch.bfloat16, torch.float32

ROUND = Precision(stochastic_rounding=True)

O = torch.optim


def neighbours(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of bf16 next to each, toward zero and away from it."""
    bits = exact.view(torch.int32)
    down = bits & ~0xFFFF
    return down.view(FP32), torch.where(bits == down, down, down + 0x10000).view(FP32)


class Flat(nn.Module):
    """Whose gradients are exactly `slope`, and which knows only parameters of one value."""

    def __init__(self, numel: int, slope: float = 1.0) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.ones(numel, dtype=BF16)), slope

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * self.slope


def small_steps(numel: int, steps: int, precision: Any, make: Callable[..., Any], **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = Flat(numel)
    engine = torch_shard.shard(model, precision=precision, **settings)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model.weight.detach().full_tensor()
    engine.close(optimizer)
    return found


def mlp() -> nn.Module:
    return MLP(width=11).to(BF16)


def train(
    rank: int,
    make: Callable[[nn.Module], Any],
    steps: int = 4,
    *,
    build: Callable[[], nn.Module] = mlp,
    seed: int = 0,
    alike: bool = False,
    **settings: Any,
) -> tuple[nn.Module, Any, Any]:
    """Train a bf16 model. Returns it, its engine and its optimizer. `alike`: all ranks have the same batches."""
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(seed)
    engine = torch_shard.shard(model, **{"unit_bytes": 300, "timeout": 20.0, "precision": ROUND, **settings})
    optimizer = make(model)
    go(model, optimizer, 0 if alike else rank, range(steps))
    return model, engine, optimizer


def go(model: nn.Module, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        loss_of(model(batch(rank, step).to(BF16))).backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def same_values(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name].view(torch.int16), value.view(torch.int16)) for name, value in theirs.items())


def adamw(model: nn.Module) -> Any:
    return O.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> Any:
    return O.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Exact:
    """Plain parameters in fp32 beside a bf16 model's. Each step begins with the model's values and gradients, so that it shows
    how the model's step should come out before it is rounded."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        self.model = model
        self.plain = nn.Module()
        for name, p in model.named_parameters():
            self.plain.register_parameter(name.replace(".", "/"), nn.Parameter(whole(p).float()))
        self.optimizer = make(self.plain)

    def step(self, optimizer: Any) -> None:
        """Step both, and compare values and state. Collective."""
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                q.copy_(whole(p))
                q.grad = None if p.grad is None else whole(p.grad).float()
        self.optimizer.step()
        optimizer.step()
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            found, exact = whole(p), q.detach()
            assert found.dtype == BF16
            # Arithmetic in another order may end on another side of a value that bf16 has.
            near = exact * (1 + torch.tensor([[-1e-6], [1e-6]]).view(2, *[1] * exact.dim()))
            low = torch.minimum(*neighbours(near.min(0).values.contiguous()))
            high = torch.maximum(*neighbours(near.max(0).values.contiguous()))
            assert ((found.float() >= low) & (found.float() <= high)).all(), name
            for key, value in self.optimizer.state.get(q, {}).items():
                ours = optimizer.state[p][key]
                if isinstance(value, torch.Tensor):
                    assert ours.dtype == value.dtype, (name, key, ours.dtype)
                    torch.testing.assert_close(whole(ours), value, rtol=1e-5, atol=1e-7, msg=f"{key} of {name}")


class Whole2D(nn.Module):
    """Matrices only, which Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in ((5, 12), (12, 9), (9, 3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _of_kind(kind: type, model: nn.Module) -> Any:
    return kind(list(model.parameters()), lr=1e-2)
