"""Training on GPUs gives the gradients and parameters of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.harness import batch, plain_backward, train_both
from tests.gpu.models import GPT, tokens
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

strategies = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])


def train_gpt_like_plain(
    rank: int, world_size: int, device: torch.device, between: nn.Module | None = None, **settings: Any
) -> None:
    """SGD in float64, where a wrong scale, a missing gradient or a stale value shows."""
    train_both(
        lambda: GPT(between=between).to(device),
        rank,
        world_size,
        make_batch=lambda rank, step: tokens(rank, step, device),
        steps=4,  # the third is the first one in which every gather is remembered, in both directions
        **{"unit_bytes": 2000, "timeout": 60.0, **settings},
    )


@strategies
@ranks(2, 3, timeout=240)
def test_ranks_that_share_a_gpu_train_like_plain(rank, world_size, device, strategy):
    train_gpt_like_plain(rank, world_size, device, strategy=strategy)


copies = pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "hybrid_shard", "shard_size": 2},
        {"strategy": "hybrid_shard_zero2", "shard_size": 2},
        {"reshard_after_forward": 2},
    ],
    ids=str,
)


@copies
@ranks(4, timeout=240)
def test_copies_on_ranks_that_share_a_gpu_train_like_plain(rank, world_size, device, settings):
    train_gpt_like_plain(rank, world_size, device, **settings)


@copies
@ranks(4, backend="nccl", timeout=240)
def test_copies_over_nccl_train_like_plain(rank, world_size, device, settings):
    train_gpt_like_plain(rank, world_size, device, **settings)


@strategies
@ranks(1, 2, backend="nccl", timeout=240)
def test_training_over_nccl_is_like_plain(rank, world_size, device, strategy):
    train_gpt_like_plain(rank, world_size, device, strategy=strategy)


@ranks(2, backend="nccl", timeout=240)
def test_training_over_one_communicator_is_like_plain(rank, world_size, device):
    train_gpt_like_plain(rank, world_size, device, single_communicator=True)


@strategies
@ranks(2, backend="nccl", timeout=240)
def test_training_in_registered_memory_is_like_plain(rank, world_size, device, strategy):
    train_gpt_like_plain(rank, world_size, device, strategy=strategy, registered_memory=True)


@pytest.mark.parametrize("prefetch", [0, 3])
@ranks(2, backend="nccl", timeout=240)
def test_training_with_another_prefetch_is_like_plain(rank, world_size, device, prefetch):
    train_gpt_like_plain(rank, world_size, device, prefetch=prefetch)


# -- order between streams ------------------------------------------------------------------------------------------------


def occupy(device: torch.device) -> None:
    """Keep the device busy for some milliseconds; the host goes on."""
    with torch.cuda.device(device):
        torch.cuda._sleep(20_000_000)  # cycles


class Late(torch.autograd.Function):
    """Keeps the device busy in forward and in backward, so that the host is far ahead of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        occupy(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        occupy(grad.device)
        return grad


class Delay(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Late.apply(x)


@strategies
@ranks(2, timeout=240)
def test_ranks_that_share_a_gpu_train_like_plain_when_the_device_lags_behind(rank, world_size, device, strategy):
    train_gpt_like_plain(rank, world_size, device, Delay(), strategy=strategy)


@strategies
@ranks(2, backend="nccl", timeout=240)
def test_training_over_nccl_is_like_plain_when_the_device_lags_behind(rank, world_size, device, strategy):
    """A buffer that is refilled, released or reduced before the device is through with it gives other numbers."""
    train_gpt_like_plain(rank, world_size, device, Delay(), strategy=strategy)


@ranks(2, backend="nccl", timeout=240)
def test_training_is_like_plain_where_the_current_device_is_not_the_models(rank, world_size, device):
    """Programs for DDP that put the model on their GPU need no ``torch.cuda.set_device``."""
    torch.cuda.set_device(0)
    train_gpt_like_plain(rank, world_size, device, Delay())


@strategies
@ranks(2, backend="nccl", timeout=240)
def test_training_on_a_stream_of_the_users_is_like_plain(rank, world_size, device, strategy):
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        train_gpt_like_plain(rank, world_size, device, Delay(), strategy=strategy)
    torch.cuda.current_stream(device).wait_stream(stream)


def scribble(device: torch.device) -> None:
    """Take what is free of the current stream's memory, and write to it at once."""
    taken = [torch.full((n,), float("nan"), dtype=torch.float64, device=device) for n in range(32, 4096, 32)]
    del taken


@strategies
@ranks(1, 2, backend="nccl", timeout=240)
def test_training_on_another_stream_than_the_model_was_sharded_on_is_like_plain(rank, world_size, device, strategy):
    """Buffers were made on the default stream. What is allocated there right after backward must not get memory that the
    other stream, which is far behind the host, still uses."""
    default, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)

    def run(model: nn.Module, x: torch.Tensor) -> None:
        stream.wait_stream(default)
        with torch.cuda.stream(stream):
            plain_backward(model, x)
        scribble(device)
        default.wait_stream(stream)  # as the user must, before the optimizer's step

    train_gpt_like_plain(rank, world_size, device, Delay(), strategy=strategy, run=run)


class Towers(nn.Module):
    """Two towers, each on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), Delay(), nn.Linear(7, 6)) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, streams: list[torch.cuda.Stream]) -> torch.Tensor:
        current = torch.cuda.current_stream(x.device)
        outputs = []
        for tower, stream in zip(self.towers, streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                outputs.append(tower(x))
        for output, stream in zip(outputs, streams, strict=True):
            current.wait_stream(stream)
            output.record_stream(current)
        return self.head(outputs[0] * outputs[1])


@strategies
@pytest.mark.parametrize("unit_bytes", [100, 1 << 20], ids=["small units", "one unit"])
@ranks(1, 2, backend="nccl", timeout=240)
def test_two_towers_on_two_streams_train_like_plain(rank, world_size, device, strategy, unit_bytes):
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    train_both(
        lambda: Towers().to(device),
        rank,
        world_size,
        run=lambda model, x: plain_backward(model, x, streams),
        make_batch=lambda rank, step: batch(rank, step).to(device),
        steps=4,
        strategy=strategy,
        unit_bytes=unit_bytes,
        timeout=60.0,
    )


# -- modules that are special on GPUs -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """On a GPU the weights of an LSTM lie in one piece of memory, as cuDNN wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.lstm = nn.LSTM(7, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.inp(x))[0])


@ranks(1, 2, timeout=240)
def test_an_lstm_trains_like_plain(rank, world_size, device):
    train_both(
        lambda: Recurrent().to(device),
        rank,
        world_size,
        make_batch=lambda rank, step: batch(rank, step, 2, 4, 5).to(device),
        timeout=60.0,
    )
