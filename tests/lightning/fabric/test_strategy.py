"""``Fabric(strategy="shard")`` trains as ``Fabric(strategy="ddp")`` does."""

from __future__ import annotations

import importlib
import time
from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.plugins.precision import DeepSpeedPrecision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.lightning.fabric.support import (
    NAMESPACES,
    Net,
    assert_same,
    assert_trains_like_ddp,
    batch,
    fabric,
    net,
    strategy,
    trained,
    whole,
)
from tests.lightning.support import NAMESPACES as TRAINERS
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard import ShardConfig, ShardTensor, engine_of
from torch_shard.errors import ConfigError

NAMES = ["shard_zero1", "shard_zero2", "shard_hybrid", "shard_hybrid_zero2", "shard_offload"]
HOW: list[dict[str, Any]] = [
    {"clip": {"max_norm": 0.1, "norm_type": float("inf")}},
    {"clip": {"clip_val": 0.02}},
    {"precision": "64-true", "rtol": 1e-10, "atol": 1e-10},
    {"precision": "bf16-true", "rtol": 2e-2, "atol": 2e-2},
]


@pytest.mark.parametrize("namespace", NAMESPACES)
@ranks(2, exhaustive=(1, 3))
def test_modules_and_optimizers_set_up_together_train_like_ddp(namespace):
    assert_trains_like_ddp(namespace=namespace, accumulate=3, clip={"max_norm": 0.3})


@pytest.mark.parametrize("name", quick(NAMES, ["shard_zero2", "shard_offload"]))
@ranks(2)
def test_every_registered_name_trains_like_ddp_set_up_apart(name):
    assert_trains_like_ddp(name, apart=True)


@pytest.mark.exhaustive
@ranks(2)
def test_accumulation_that_reduces_at_each_backward_trains_like_ddp():
    assert_trains_like_ddp(strategy(defer_gradient_sync=False), accumulate=3)


@pytest.mark.parametrize("how", quick(HOW, HOW[1:2]), ids=str)
@ranks(2)
def test_clipping_and_precisions_are_those_of_ddp(how):
    assert_trains_like_ddp(**how)


@ranks(2)
def test_16_mixed_trains_like_ddp_with_clipping():
    def scaled() -> Any:  # The plugin of "16-mixed", for which Fabric takes another one on the CPU.
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return MixedPrecision("16-mixed", "cpu", scaler)

    losses, weights = trained("shard", plugins=[scaled()], clip={"max_norm": 0.3})
    expected_losses, expected_weights = trained("ddp", plugins=[scaled()], clip={"max_norm": 0.3})
    torch.testing.assert_close(losses, expected_losses, rtol=1e-2, atol=1e-2)
    assert_same(weights, expected_weights, rtol=1e-2, atol=1e-2)


@ranks(2)
def test_marked_methods_go_through_forward_and_unmarked_ones_are_refused():
    x, y = batch(0)
    with pytest.raises(RuntimeError, match="mark_forward_method"):
        fabric().setup(net()).loss(x, y)
    model = fabric(precision="bf16-mixed").setup(net())
    model.mark_forward_method("encode")
    ran: list[torch.dtype] = []
    model.module.inner.register_forward_hook(lambda *given: ran.append(given[-1].dtype))
    model.encode(x)
    assert ran == [torch.bfloat16]  # under autocast, as forward is


@ranks(2)
def test_a_module_made_on_meta_is_sharded_with_values_and_its_optimizer_holds_them():
    f = fabric()
    torch.manual_seed(3)
    with f.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    assert all(p.is_meta for p in model.parameters())
    with f.init_tensor():
        assert torch.zeros(2).device.type == "cpu"
    model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = whole(model)
    assert all(value.isfinite().all() and value.abs().sum() > 0 for value in before.values())
    x, y = batch(0)
    f.backward((model(x) - y).square().mean())
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in whole(model).items())


@ranks(2)
def test_parameters_are_sharded_and_the_engine_is_at_hand():
    f = fabric()
    model = f.setup(net())
    engine = f.strategy.engine_of(model)
    assert engine is engine_of(model.module) and isinstance(model.module, Net)
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    assert engine.memory_summary()["parameters"] < 0.6 * sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(ConfigError, match=r"fabric\.setup"):
        f.strategy.engine_of(nn.Linear(1, 1))
    compiled = torch.compile(before := net(6), backend="eager")
    for each, own in (
        (f.setup(compiled), before),
        (compiled, before),
        (torch.compile(model, backend="eager"), model.module),
    ):
        assert f.strategy.engine_of(each) is engine_of(own) is not None


def test_a_precision_plugin_of_another_strategy_is_refused():
    with pytest.raises(MisconfigurationException, match="ShardFabricStrategy"):
        strategy(precision=DeepSpeedPrecision.__new__(DeepSpeedPrecision))


# -- what else Fabric offers --------------------------------------------------------------------------------------------

# The tests above have the first one.
both = pytest.mark.parametrize("namespace", quick(NAMESPACES, NAMESPACES[1:]))


@both
@ranks(2)
def test_ranks_talk_to_each_other(namespace, rank):
    def run(f: Any) -> Any:
        mine = torch.tensor([rank + 1.0, 2.0], requires_grad=True)
        everyone = f.all_gather(mine, sync_grads=True)
        everyone[:, 0].pow(2).sum().backward()
        return [
            f.all_reduce({"a": mine.detach().clone()})["a"],
            f.all_reduce(mine.detach().clone(), reduce_op="sum"),
            everyone.detach(),
            mine.grad,
            f.all_gather({"b": torch.tensor(rank)})["b"],
            torch.tensor(f.broadcast({"rank": rank}, src=1)["rank"]),
            f.broadcast(torch.tensor([rank]), src=1),
        ]

    found, expected = (run(fabric(which, namespace=namespace)) for which in ("shard", "ddp"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@both
@ranks(2)
def test_a_lightning_modules_steps_and_marked_methods_are_forwards(namespace):
    package = TRAINERS["lightning" if namespace == NAMESPACES[0] else "pytorch_lightning"]

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, given: Any, index: int) -> torch.Tensor:
            x, y = given
            return (self.net(x) - y).square().mean()

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self.net.encode(x).square().mean()

    def run(f: Any) -> Any:
        model, optimizer = f.setup(m := Module(), torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9))
        model.mark_forward_method("score")
        for step in range(3):
            f.backward(model.training_step(batch(step), step))
            with f.no_backward_sync(model, enabled=False):
                f.backward(model.score(batch(step)[0]))
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    # score() leaves parameters unused, which DDP must be told.
    ddp = importlib.import_module(f"{namespace}.strategies").DDPStrategy(find_unused_parameters=True)
    found, expected = (run(fabric(which, namespace=namespace)) for which in ("shard", ddp))
    assert_same(found, expected)


def first(f):
    with f.rank_zero_first():
        pass


WAITS = {
    "barrier": lambda f: f.barrier(),
    "broadcast": lambda f: f.broadcast(["an object"]),
    "all_reduce": lambda f: f.all_reduce(torch.ones(2)),
    "all_gather": lambda f: f.all_gather(torch.ones(2)),
    "rank_zero_first": first,
}


@pytest.mark.parametrize("where", quick(WAITS, ["all_reduce"]))
@ranks(2)
def test_rank_0_samples_at_once_while_the_others_wait_in_something_of_fabrics(rank, where):
    f = fabric(strategy(config=ShardConfig(alone_after=30.0)))
    model = f.setup(net())
    for _ in range(2):
        begin = time.monotonic()
        if f.is_global_zero:
            with torch.no_grad():
                model(torch.ones(1, 6))
        WAITS[where](f)
        assert time.monotonic() - begin < 5
    assert f.strategy.engine_of(model).statistics().lone_reads == (2 if rank == 0 else 0)
