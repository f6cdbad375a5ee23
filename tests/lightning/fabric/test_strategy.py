"""``Fabric(strategy="shard")`` trains as ``Fabric(strategy="ddp")`` does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from tests.lightning.fabric.support import NAMESPACES, Net, assert_same, batch, fabric, net, strategy, whole
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import ShardTensor, engine_of
from torch_shard.errors import ConfigError


def trained(
    strategy: Any, *, apart: bool = False, accumulate: int = 1, clip: dict[str, float] | None = None, **options: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and norms of some steps, and the weights after them."""
    f = fabric(strategy, **options)
    model: Any = net()
    if apart:
        model = f.setup_module(model)
        optimizer = f.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    else:
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for step in range(4):
        for micro in range(accumulate):
            x, y = batch(step * accumulate + micro)
            with f.no_backward_sync(model, enabled=micro + 1 < accumulate):
                loss = (model(x) - y).square().mean() / accumulate
                f.backward(loss)
            found.append(f.all_reduce(loss.detach().clone()))
        if clip is not None:
            norm = f.clip_gradients(model, optimizer, **clip)
            if norm is not None:
                found.append(norm.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return found, whole(model)


def assert_trains_like_ddp(name: Any = "shard", namespace: str = "lightning.fabric", **how: Any) -> None:
    losses, weights = trained(name, namespace=namespace, **how)
    expected_losses, expected_weights = trained("ddp", namespace=namespace, **how)
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-7)
    assert_same(weights, expected_weights)


@pytest.mark.parametrize("namespace", quick(NAMESPACES, ["lightning.fabric"]))
@ranks(2, exhaustive=(1, 3))
def test_modules_and_optimizers_set_up_together_train_like_ddp(namespace):
    assert_trains_like_ddp(namespace=namespace)


NAMES = ["shard", "shard_zero1", "shard_zero2", "shard_hybrid", "shard_hybrid_zero2"]


@pytest.mark.parametrize("name", quick(NAMES, ["shard_zero2"]))
@ranks(2)
def test_every_registered_name_trains_like_ddp_set_up_apart(name):
    assert_trains_like_ddp(name, apart=True)


@pytest.mark.parametrize("defer", [True, *exhaustive(False)])
@ranks(2)
def test_accumulation_under_no_backward_sync_trains_like_ddp(defer):
    assert_trains_like_ddp(strategy(defer_gradient_sync=defer), accumulate=3)


@pytest.mark.parametrize(
    "clip", [{"max_norm": 0.3}, *exhaustive({"max_norm": 0.1, "norm_type": float("inf")}), {"clip_val": 0.02}], ids=str
)
@ranks(2)
def test_gradients_are_clipped_as_with_ddp(clip):
    assert_trains_like_ddp(clip=clip)


@pytest.mark.parametrize("precision", quick(["64-true", "bf16-true"], ["64-true"]))
@ranks(2)
def test_each_precision_trains_like_ddp(precision):
    tolerance = {"64-true": 1e-10, "bf16-true": 2e-2}[precision]
    losses, weights = trained("shard", precision=precision)
    expected_losses, expected_weights = trained("ddp", precision=precision)
    torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=tolerance)
    assert_same(weights, expected_weights, rtol=tolerance, atol=tolerance)


def scaled() -> Any:
    """The plugin of ``16-mixed``, for which Fabric takes another one on the CPU."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


@ranks(2)
def test_16_mixed_trains_like_ddp_with_clipping():
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


@pytest.mark.exhaustive
@ranks(2)
def test_a_compiled_module_is_compiled_anew_and_trains_like_ddp(tmp_path):
    def run(strategy: str) -> dict[str, torch.Tensor]:
        f = fabric(strategy)
        model = net()
        plain = f.setup(torch.compile(model, backend="eager"))
        optimizer = f.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x, y = batch(step)
            f.backward((plain(x) - y).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        f.save(tmp_path / strategy, {"model": plain, "optimizer": optimizer})
        return f.load(tmp_path / strategy)["model"]

    assert_same(run("shard"), run("ddp"))


@ranks(2)
def test_two_modules_and_their_optimizers_train_like_ddp():
    def run(strategy: str) -> list[dict[str, torch.Tensor]]:
        f = fabric(strategy)
        first, second = net(1), net(2)
        opt = torch.optim.SGD(first.parameters(), lr=0.1)
        first, second = f.setup_module(first), f.setup_module(second)
        opt, own = f.setup_optimizers(opt, torch.optim.SGD(second.head.parameters(), lr=0.2))
        for step in range(3):
            x, y = batch(step)
            f.backward((first(x) + second(x) - y).square().mean())
            f.clip_gradients(first, opt, max_norm=0.2)
            f.clip_gradients(second, own, clip_val=0.01)
            opt.step()
            own.step()
            opt.zero_grad()
            second.zero_grad()
        return [whole(first), whole(second)]

    for found, expected in zip(run("shard"), run("ddp"), strict=True):
        assert_same(found, expected)


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
def test_parameters_are_slices_and_the_engine_is_at_hand():
    f = fabric()
    model = f.setup(net())
    engine = f.strategy.engine_of(model)
    assert engine is engine_of(model.module) and isinstance(model.module, Net)
    assert all(isinstance(p, ShardTensor) for p in model.parameters())
    assert engine.memory_summary()["parameters"] < 0.6 * sum(p.numel() * 4 for p in model.parameters())
    with pytest.raises(ConfigError, match=r"fabric\.setup"):
        f.strategy.engine_of(nn.Linear(1, 1))


@ranks(2)
def test_the_engine_of_a_compiled_module_is_at_hand():
    f, before, after = fabric(), net(), net(6)
    compiled = torch.compile(before, backend="eager")
    found = f.setup(compiled)
    compiled_later = torch.compile(f.setup(after), backend="eager")
    for each, own in ((before, before), (compiled, before), (found, before), (compiled_later, after)):
        assert f.strategy.engine_of(each) is engine_of(own) is not None


def test_settings_that_are_wrong_are_refused_by_name():
    for bad in ({"prefetc": 1}, {"state_dict_type": "half"}, {"async_save": True}, {"strategy": "zero9"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            strategy(**bad)
    from lightning.fabric.plugins.precision import DeepSpeedPrecision
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="ShardFabricStrategy"):
        strategy(precision=DeepSpeedPrecision.__new__(DeepSpeedPrecision))
