"""What the tests of the Accelerate front end share: its global state reset, small models, and one training to compare.

A body of a test runs under stock Accelerate (DistributedDataParallel) or under ours alike::

    @ranks(2)
    def test_something():
        stock = train(STOCK)
        ours = train(OURS, shard_plugin=ShardPlugin(strategy="zero2"))
        assert_same(ours, stock)
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelerate_shard
import torch_shard
from torch_shard import Engine

STOCK = accelerate.Accelerator
OURS = accelerate_shard.Accelerator
BOTH = [STOCK, OURS]

FEATURES, HIDDEN, CLASSES = 12, 16, 5


# -- Accelerate's global state ----------------------------------------------------------------------------------------
def reset() -> None:
    """Forget Accelerate's singletons, as a new process would. The process group stays. Not collective."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Inside, Accelerate is as in a new process; afterwards too, with the environment, which it writes to, as before."""
    before = dict(os.environ)
    threads = torch.get_num_threads()
    reset()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(pin_memory|lr_scheduler|OMP_NUM_THREADS).*")
            yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def accelerator(kind: type[accelerate.Accelerator] = OURS, /, **options: Any) -> Iterator[Any]:
    """An Accelerator of class `kind` on the CPU, one process of a MULTI_CPU run where there are several ranks.

    Accelerate's state is reset before and after. `options` are those of the class; ``shard_plugin`` is dropped for the stock one.
    """
    with clean_state():
        if kind is STOCK:
            options.pop("shard_plugin", None)
        yield kind(cpu=True, **options)  # not end_training() afterwards, which ends the process group too


# -- models and data --------------------------------------------------------------------------------------------------
class Layer(nn.Module):
    """A residual block with a normalisation."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """A classifier of two layers; :data:`FEATURES` in, :data:`CLASSES` out."""

    def __init__(self, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Linear(features, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(seed: int = 0, **options: Any) -> Net:
    """A :class:`Net` with the same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options)


def dataset(size: int = 24, seed: int = 1) -> TensorDataset:
    """`size` random inputs [FEATURES] with classes, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (size,), generator=generator)
    return TensorDataset(x, y)


def loader(size: int = 24, batch_size: int = 4, seed: int = 1, **options: Any) -> DataLoader[Any]:
    """Batches of :func:`dataset`, which ``prepare`` distributes over the ranks."""
    return DataLoader(dataset(size, seed), batch_size=batch_size, **options)


# -- a training -------------------------------------------------------------------------------------------------------
@dataclass
class Result:
    """What a training has to show: on every rank its own losses, and the rest equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model."""
    from accelerate_shard.models.unwrap import engine_of as found

    engine = found(model)
    assert engine is not None, "the model is not sharded"
    return engine


def sgd(params: Any) -> torch.optim.Optimizer:
    """The optimizer that shows a wrong scale of gradients, which Adam hides."""
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)


def train(
    kind: type[accelerate.Accelerator] = OURS,
    /,
    *,
    make: Callable[[], nn.Module] = net,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    max_norm: float = 1.0,
    batch_size: int = 4,
    size: int = 24,
    epochs: int = 1,
    loss: Callable[[nn.Module, Any], torch.Tensor] = loss_of,
    **options: Any,
) -> Result:
    """Train as a plain Accelerate script does, with gradients clipped to `max_norm`. Collective.

    Args:
        kind: :data:`STOCK` or :data:`OURS`.
        options: of the Accelerator.
    """
    with accelerator(kind, **options) as acc:
        model = make()
        steps = optimizer(model.parameters())
        model, steps, data = acc.prepare(model, steps, loader(size, batch_size))
        result = Result()
        for _ in range(epochs):
            for batch in data:
                with acc.accumulate(model):
                    value = loss(model, batch)
                    acc.backward(value)
                    if acc.sync_gradients:
                        result.norms.append(float(acc.clip_grad_norm_(model.parameters(), max_norm)))
                    steps.step()
                    steps.zero_grad()
                result.losses.append(value.item())
        result.parameters = full_parameters(acc.unwrap_model(model))
        return result


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


def differs_between_ranks(value: Any) -> bool:
    """Whether the ranks hold different ones of `value`. Collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return any(other != values[0] for other in values)
