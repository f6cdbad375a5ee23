"""One training to compare, under stock Accelerate (DistributedDataParallel) or under ours alike.

::

    @ranks(2)
    def test_something():
        assert_same(train(OURS, shard_plugin=ShardPlugin(strategy="shard_grad_op")), train(STOCK))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
from torch import nn

import torch_shard
from tests.accelerate.support.accelerators import OURS, accelerator
from tests.accelerate.support.models import loader, loss_of, net, sgd


@dataclass
class Result:
    """What a training has to show: on every rank its own losses, and the rest equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def prepared(acc: Any, size: int = 24, batch_size: int = 4, make: Callable[[], nn.Module] = net) -> Any:
    """A prepared model, its optimizer, and batches. Collective."""
    model = make()
    return acc.prepare(model, sgd(model.parameters()), loader(size, batch_size))


def steps(
    acc: Any,
    model: nn.Module,
    optimizer: Any,
    data: Any,
    scheduler: Any = None,
    *,
    max_norm: float = 1.0,
    epochs: int = 1,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
) -> Result:
    """Train what was prepared, as a plain Accelerate script does, with gradients clipped to `max_norm`. Collective."""
    result = Result()
    for _ in range(epochs):
        for batch in data:
            with acc.accumulate(model):
                value = loss(model, batch)
                acc.backward(value)
                if acc.sync_gradients:
                    result.norms.append(float(acc.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
                optimizer.zero_grad()
            result.losses.append(value.item())
    result.parameters = full_parameters(acc.unwrap_model(model, keep_torch_compile=False))
    return result


def train(
    kind: type[accelerate.Accelerator] = OURS,
    /,
    *,
    make: Callable[[], nn.Module] = net,
    batch_size: int = 4,
    size: int = 24,
    max_norm: float = 1.0,
    epochs: int = 1,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
    **options: Any,
) -> Result:
    """Prepare and train a model of `make` with :func:`steps`. Collective.

    Args:
        kind: :data:`STOCK` or :data:`OURS`.
        options: of the Accelerator.
    """
    with accelerator(kind, **options) as acc:
        return steps(acc, *prepared(acc, size, batch_size, make), max_norm=max_norm, epochs=epochs, loss=loss)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the whole parameters by name, on the CPU. Collective."""
    engine = torch_shard.engine_of(model)
    with contextlib.nullcontext() if engine is None else engine.gathered():
        return {name: p.detach().cpu().clone() for name, p in model.named_parameters()}


def assert_same(found: Result, wanted: Result, rtol: float = 1e-5) -> None:
    """Losses and norms agree to `rtol`; parameters as closely, in relation to their largest element."""
    assert found.losses and len(found.losses) == len(wanted.losses)
    torch.testing.assert_close(found.losses, wanted.losses, rtol=rtol, atol=0)
    torch.testing.assert_close(found.norms, wanted.norms, rtol=rtol, atol=0)
    assert list(found.parameters) == list(wanted.parameters)
    for name, value in wanted.parameters.items():
        off = (found.parameters[name] - value).abs().max() / value.abs().max().clamp_min(1e-3)
        assert off <= rtol, f"{name} is off by {off:.2e}"
