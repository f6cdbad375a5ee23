"""Activation offload of sharded models: the same bits as without it, and no memory of the engine's is copied."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.offload_models import ROWS, WIDTH, Layer, Net, batch, equal, offload_in
from tests.support.ranks import ranks
from torch_shard import Precision, ShardConfig
from torch_shard.activation_checkpointing import checkpointed_layers, offload_of

INPUT = ROWS * WIDTH * 4  # bytes


def sharded(model: nn.Module, offloaded: Any, chosen: Any = False, **settings: Any) -> Any:
    config = ShardConfig(units=(Layer,), timeout=20.0, **settings)
    with checkpointed_layers(model, chosen, config.units, offloaded):
        return torch_shard.shard(model, config)


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def trained(model: nn.Module, engine: Any, rank: int, micro: int = 1, sync: bool = True) -> list[torch.Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(7)
    for step in range(3):
        for part in range(micro):
            with contextlib.nullcontext() if sync or part == micro - 1 else engine.no_sync():
                # As many bytes in 16 bits as one batch has in 32.
                loss = model(torch.cat([batch(step * micro + part, 10 * rank + i) for i in range(2)]))
                loss.backward()
            found.append(loss.detach())
        found += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


SETTINGS: list[dict[str, Any]] = [
    {"strategy": "full_shard"},
    {"strategy": "full_shard", "offload": "cpu"},
    {"strategy": "full_shard", "precision": Precision(torch.bfloat16)},
    {"strategy": "shard_grad_op"},
    {"strategy": "shard_optim"},
    {"strategy": "no_shard"},
    {"strategy": "full_shard", "prefetch": 0, "debug": True},
]


@pytest.mark.parametrize("settings", [*SETTINGS[:2], *exhaustive(*SETTINGS[2:])], ids=str)
@pytest.mark.parametrize("micro", [2, *exhaustive(1)])
@ranks(2, exhaustive=(1, 3))
def test_training_gives_the_same_bits(rank, settings, micro):
    found, sent = {}, set()
    for offloaded in (False, True):
        torch.manual_seed(0)
        model = Net()
        engine = sharded(model, offloaded, True, **settings)
        found[offloaded] = trained(model, engine, rank, micro, sync=micro == 1)
        sent.add(engine.bytes_sent)
        if offloaded:
            size = INPUT if "precision" in settings else 2 * INPUT
            assert offload_in(model).copied_out == 3 * micro * 4 * size and offload_in(model).late == 0
            assert offload_in(model).host_bytes_in_use == 0
            assert [sum(there) for there in model.there] == [1] * 4 and model.kept() == [False] * 4
    assert equal(found[True], found[False])
    assert len(sent) == 1, "and what is gathered is gathered as often"


class Shares(Layer):
    """Takes a weight as an argument."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + torch.sin(x @ weight)


class Gives(nn.Module):
    """A unit that gives its layer a view of a weight, whose memory is the unit's while it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.layer = Shares()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, weight=self.weight.t())  # type: ignore[no-any-return]


class WithViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(Gives(), Gives(), Gives())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "no_shard")])
@ranks(1, 2)
def test_views_of_gathered_weights_are_not_copied(rank, strategy):
    """Their memory comes and goes as the engine says, and it is there again in backward."""
    found = []
    for offloaded in (False, True):
        torch.manual_seed(0)
        model, config = WithViews(), ShardConfig(strategy=strategy, units=(Gives,), timeout=20.0)
        with checkpointed_layers(model, (Shares,), config.units, offloaded):
            engine = torch_shard.shard(model, config)
        found.append(trained(model, engine, rank))
        if offloaded:
            assert offload_in(model).copied_out == 3 * 3 * 2 * INPUT
    assert equal(*found)


@ranks(2)
def test_a_model_that_cannot_be_sharded_is_left_without_offload(rank):
    model = Net()
    weight = model.first.weight
    weight.data = weight.data[:1].expand(WIDTH, WIDTH)
    with pytest.raises(torch_shard.ShardError):
        sharded(model, True)
    assert offload_of(model) is None
