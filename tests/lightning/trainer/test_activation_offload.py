"""``activation_offload=`` of the strategies: inputs of layers wait in host memory, and the numbers are those of ddp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import torch_shard
from tests.lightning.fabric import support as fabric_helpers
from tests.lightning.support import BATCH, BATCHES, assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.activation_checkpointing import offload_of
from torch_shard.activation_offload import MIN_BYTES
from torch_shard.errors import ConfigError

WIDE = MIN_BYTES // (BATCH // 2) // 4  # with two ranks just enough


class Wide(nn.Module):
    """A layer of many activations and few parameters, which repeats in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.1, 1, WIDE))
        self.rest = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.rest(x) * self.scale)


class Between(nn.Module):
    """Widens, and narrows again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width, x = x.shape[-1], x.repeat(1, WIDE // x.shape[-1] + 1)[:, :WIDE] + 0.1
        for layer in self.layers:
            x = layer(x)
        return x[:, :width]


def module_class() -> Any:
    class Module(net_class("lightning")):
        def __init__(self) -> None:
            super().__init__()
            self.between = Between()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * self.between(x))

    return Module


class Counts(Callback):
    """What has been moved when a fit ends."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        offload = offload_of(module)
        self.copied, self.late = (None, None) if offload is None else (offload.copied_out, offload.late)
        self.names = list(trainer.strategy.lightning_module_state_dict())


def strategy(**options: Any) -> Any:
    from lightning_shard.for_lightning import ShardStrategy

    return ShardStrategy(**options)


CHOICES: list[dict[str, Any]] = [
    {"activation_offload": "Wide"},
    {"activation_offload": Wide, "strategy": "shard_grad_op"},
    {"activation_offload": [Wide], "activation_checkpointing": Wide},
    {"activation_offload": True, "activation_checkpointing": "Wide", "strategy": "no_shard"},
    {"activation_offload": True, "units": (Wide,)},
]


@pytest.mark.parametrize("options", [CHOICES[0], *exhaustive(*CHOICES[1:])], ids=str)
@ranks(2)
def test_inputs_of_chosen_layers_are_moved_with_the_numbers_and_names_of_a_single_device(world_size, options):
    expected, module, plain, ours = module_class()(), module_class()(), Counts(), Counts()
    single("lightning", accumulate_grad_batches=2, callbacks=[plain]).fit(expected, loader(1))
    t = trainer("lightning", world_size, strategy(**options), accumulate_grad_batches=2, callbacks=[ours])
    t.fit(module, loader(world_size))
    assert (ours.copied, ours.late) == (BATCHES * 3 * MIN_BYTES, 0)
    assert ours.names == plain.names
    assert_same_state(module.state_dict(), expected.state_dict())
    assert offload_of(module) is None, "given back as it was"


@ranks(2)
def test_layers_that_are_not_there_or_keep_nothing_are_refused_before_anything_is_sharded(world_size):
    for options, said in (
        ({"activation_offload": "Wde"}, "activation_offload.*'Wde'.*There is Wide"),
        (
            {"activation_offload": Wide, "activation_checkpointing": Between},
            "activation_offload: Wide is inside of Between",
        ),
    ):
        module = module_class()()
        with pytest.raises(ConfigError, match=said):
            trainer("lightning", world_size, strategy(**options)).fit(module, loader(world_size))
        assert torch_shard.engine_of(module) is None


@pytest.mark.parametrize("wrong", [3, "", [Wide, 3], nn.Linear(1, 1)])
def test_what_is_no_class_nor_name_is_refused_at_once(wrong):
    for make in (strategy, fabric_helpers.strategy):
        with pytest.raises(ConfigError, match=r"^activation_offload(\[[01]\])?\b"):
            make(activation_offload=wrong)


@ranks(2)
def test_fabric_moves_inputs_and_trains_like_ddp():
    def run(given):
        f = fabric_helpers.fabric(given)
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 7), Between(), nn.Linear(7, 3))
        between = model[1]
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = fabric_helpers.batch(step)
            f.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        offload = offload_of(between)
        return offload and offload.copied_out, fabric_helpers.whole(model)

    (copied, weights), (none, expected) = run(fabric_helpers.strategy(activation_offload="Wide")), run("ddp")
    assert (copied, none) == (9 * MIN_BYTES, None)
    fabric_helpers.assert_same(weights, expected)
