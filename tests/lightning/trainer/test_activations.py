"""Layers that ``activation_checkpointing=`` and ``activation_offload=`` choose train with the same numbers, computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.lightning.fabric import support as fabric_helpers
from tests.lightning.support import BATCH, BATCHES, Net, compare, fitted, loader, shard_strategy, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.activation_checkpointing import offload_of
from torch_shard.activation_offload import MIN_BYTES
from torch_shard.errors import ConfigError

WIDE = MIN_BYTES // (BATCH // 2) // 4  # with two ranks just enough to be moved
LAYERS = 3


class Wide(nn.Module):
    """A layer of many activations and few parameters, which repeats in a list and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1, WIDE))
        self.rest = nn.Dropout(0.0)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + torch.tanh(self.rest(x) * self.scale)


class Between(nn.Module):
    """Widens, and narrows again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width, x = x.shape[-1], x.repeat(1, WIDE // x.shape[-1] + 1)[:, :WIDE] + 0.1
        for layer in self.layers:
            x = layer(x)
        return x[:, :width]


class Module(Net):
    def __init__(self) -> None:
        super().__init__()
        self.between = Between()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 0.1 * self.between(x))

    def on_train_start(self) -> None:
        for layer in self.between.layers:
            layer.calls = 0

    def on_train_end(self) -> None:
        """Notes how often each layer has run, the bytes that were moved, and the names in a checkpoint."""
        self.calls = [layer.calls for layer in self.between.layers]
        offload = offload_of(self)
        self.moved, self.late = (0, 0) if offload is None else (offload.copied_out, offload.late)
        self.names = list(self.trainer.strategy.lightning_module_state_dict())


CHOICES: list[dict[str, Any]] = [
    {"activation_checkpointing": ["Wide"], "strategy": "no_shard"},
    {"activation_checkpointing": True, "units": (Wide,), "strategy": "shard_grad_op"},
    {"activation_offload": Wide, "strategy": "shard_grad_op"},
    {"activation_offload": [Wide], "activation_checkpointing": Wide},
    {"activation_offload": True, "activation_checkpointing": "Wide", "strategy": "no_shard"},
    {"activation_offload": True, "units": (Wide,)},
]


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": Wide}, {"activation_offload": "Wide"}, *exhaustive(*CHOICES)], ids=str
)
@ranks(2)
def test_chosen_layers_are_computed_again_with_the_numbers_and_names_of_a_single_device(world_size, options):
    module, expected, _ = compare(world_size, Module, shard_strategy(**options), accumulate_grad_batches=2)
    assert (expected.calls, module.calls) == ([BATCHES] * LAYERS, [2 * BATCHES] * LAYERS)
    moved = BATCHES * LAYERS * MIN_BYTES if "activation_offload" in options else 0
    assert (module.moved, module.late) == (moved, 0)
    assert module.names == expected.names
    assert offload_of(module) is None, "given back as it was"
    assert not any("forward" in layer.__dict__ for layer in module.between.layers)


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_that_stayed_sharded_is_trained_as_the_next_strategy_says():
    module = Module()
    for chosen, times in ((Wide, 2), (None, 1), ("Wide", 2)):
        given = shard_strategy(activation_checkpointing=chosen, unshard_at_end=False)
        fitted(module, given)
        assert module.calls == [times * BATCHES] * LAYERS
    assert torch_shard.engine_of(module) is not None


@ranks(2)
def test_layers_that_are_not_there_are_refused_before_anything_is_sharded(world_size):
    for options, said in (
        ({"activation_checkpointing": "Wde"}, "'Wde'.*There is Wide"),
        ({"activation_checkpointing": nn.Conv2d}, "Conv2d"),
        ({"activation_checkpointing": nn.ModuleList}, "no forward"),
        ({"activation_offload": "Wde"}, "activation_offload.*'Wde'.*There is Wide"),
        ({"activation_offload": Wide, "activation_checkpointing": Between}, "Wide is inside of Between"),
    ):
        module = Module()
        t = trainer("lightning", world_size, shard_strategy(**options), precision="64-true")
        with pytest.raises(ConfigError, match=said):
            t.fit(module, loader(world_size))
        assert torch_shard.engine_of(module) is None and module.scale.dtype == torch.float32


@pytest.mark.parametrize("wrong", [3, "", [Wide, 3], nn.Linear(1, 1)])
@pytest.mark.parametrize("name", ["activation_checkpointing", "activation_offload"])
def test_what_is_no_class_nor_name_is_refused_at_once(name, wrong):
    for make in (shard_strategy, fabric_helpers.strategy):
        with pytest.raises(ConfigError, match=name):
            make(**{name: wrong})


@pytest.mark.parametrize("name", ["activation_checkpointing", "activation_offload"])
@ranks(2)
def test_fabric_computes_chosen_layers_again_and_trains_like_ddp(name):
    def run(given):
        f = fabric_helpers.fabric(given)
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 7), Between(), nn.Linear(7, 3))
        between, names = model[1], list(model.state_dict())
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = fabric_helpers.batch(step)
            f.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert list(fabric_helpers.whole(model)) == names
        offload = offload_of(between)
        assert (0 if offload is None else offload.copied_out) in (0, 3 * LAYERS * MIN_BYTES)
        return [layer.calls for layer in between.layers], offload is not None, fabric_helpers.whole(model)

    calls, moved, weights = run(fabric_helpers.strategy(**{name: "Wide"}))
    expected_calls, _, expected = run("ddp")
    assert (calls, expected_calls, moved) == ([6] * LAYERS, [3] * LAYERS, name == "activation_offload")
    fabric_helpers.assert_same(weights, expected)
