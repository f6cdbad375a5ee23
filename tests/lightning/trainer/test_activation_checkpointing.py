"""``activation_checkpointing=`` of the strategies: the same numbers and names, layers computed again in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import torch_shard
from tests.lightning.fabric import support as fabric_helpers
from tests.lightning.support import BATCHES, assert_same_state, loader, net_class, single, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError


class Block(nn.Module):
    """A layer that counts its forwards."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.outer = nn.Linear(width, width)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.outer(torch.tanh(self.inner(x)))


def blocks_class(namespace: str = "lightning") -> Any:
    class Blocks(net_class(namespace)):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

    return Blocks


def strategy(**options: Any) -> Any:
    from lightning_shard.for_lightning import ShardStrategy

    return ShardStrategy(**options)


class Counts(Callback):
    """How often each block has run in a fit, and the names in a checkpoint made meanwhile."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        for block in module.blocks:
            block.calls = 0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.calls = [block.calls for block in module.blocks]
        self.names = list(trainer.strategy.lightning_module_state_dict())


CHOICES = [Block, "Block", [Block], {"Block"}, True]


@pytest.mark.parametrize("chosen", [CHOICES[0], *exhaustive(*CHOICES[1:])], ids=str)
@pytest.mark.parametrize("name", ["full_shard", *exhaustive("no_shard", "shard_grad_op")])
@ranks(2)
def test_chosen_layers_are_computed_again_with_the_same_numbers_and_names(world_size, chosen, name):
    expected, module, plain, ours = blocks_class()(), blocks_class()(), Counts(), Counts()
    single("lightning", callbacks=[plain]).fit(expected, loader(1))
    given = strategy(activation_checkpointing=chosen, strategy=name)
    trainer("lightning", world_size, given, callbacks=[ours]).fit(module, loader(world_size))
    assert plain.calls == [BATCHES, BATCHES] and ours.calls == [2 * BATCHES, 2 * BATCHES]
    assert ours.names == plain.names
    assert_same_state(module.state_dict(), expected.state_dict())
    assert not any("forward" in block.__dict__ for block in module.blocks), "given back as it was"


@pytest.mark.exhaustive
@ranks(2, timeout=200)
def test_compiled_layers_are_computed_again(world_size):
    class Compiled(blocks_class()):
        def configure_model(self):
            if self.blocks[0]._compiled_call_impl is None:
                for block in self.blocks:
                    block.compile(backend="aot_eager")

    torch._dynamo.reset()
    expected, module = blocks_class()(), Compiled()
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size, strategy(activation_checkpointing="Block")).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())


@pytest.mark.exhaustive
@ranks(2)
def test_a_module_that_stayed_sharded_is_trained_as_the_next_strategy_says(world_size):
    module, counts = blocks_class()(), Counts()
    for chosen, times in ((Block, 2), (None, 1), ("Block", 2)):
        given = strategy(activation_checkpointing=chosen, unshard_at_end=False)
        t = trainer("lightning", world_size, given, callbacks=[counts])
        t.fit(module, loader(world_size))
        assert counts.calls == [times * BATCHES] * 2
        t.test(module, loader(world_size), verbose=False)
        assert counts.calls == [times * BATCHES] * 2
    assert torch_shard.engine_of(module) is not None


@ranks(2)
def test_layers_that_are_not_there_are_refused_before_anything_is_sharded(world_size):
    for chosen, said in (("Blok", "'Blok'.*There is Block"), (nn.Conv2d, "Conv2d"), (nn.ModuleList, "no forward")):
        module = blocks_class()()
        t = trainer("lightning", world_size, strategy(activation_checkpointing=chosen), precision="64-true")
        with pytest.raises(ConfigError, match=said):
            t.fit(module, loader(world_size))
        assert torch_shard.engine_of(module) is None and module.scale.dtype == torch.float32


@pytest.mark.parametrize("wrong", [3, "", [Block, 3], nn.Linear(1, 1)])
def test_what_is_no_class_nor_name_is_refused_at_once(wrong):
    for make in (strategy, fabric_helpers.strategy):
        with pytest.raises(ConfigError, match="activation_checkpointing"):
            make(activation_checkpointing=wrong)


@ranks(2)
def test_fabric_computes_chosen_layers_again_and_trains_like_ddp():
    def run(given):
        f = fabric_helpers.fabric(given)
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(6, 7), Block(), nn.Dropout(0.0), Block(), nn.Linear(7, 3))
        names, blocks = list(model.state_dict()), [model[1], model[3]]
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = fabric_helpers.batch(step)
            f.backward((model(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert list(fabric_helpers.whole(model)) == names
        return [block.calls for block in blocks], fabric_helpers.whole(model)

    calls, weights = run(fabric_helpers.strategy(activation_checkpointing="Block"))
    expected_calls, expected = run("ddp")
    assert (calls, expected_calls) == ([6, 6], [3, 3])
    fabric_helpers.assert_same(weights, expected)
