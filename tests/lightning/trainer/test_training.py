"""Training through the Trainer gives what a single device gives."""

from __future__ import annotations

import math
import re
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

import lightning_shard
import torch_shard
from lightning_shard.trainer.clipping import ShardedClipping
from tests.lightning.support import (
    assert_same_state,
    both_namespaces,
    either_namespace,
    late_class,
    loader,
    net_class,
    single,
    trainer,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardConfig, ShardError, ShardTensor


def compare(
    namespace: str,
    world_size: int,
    make: Any = None,
    strategy: Any = "shard",
    single_options: Any = None,
    **options: Any,
) -> Any:
    """Fit on one device and sharded; the parameters must be equal. Returns the sharded module and Trainer."""
    make = make or net_class(namespace)
    expected, module = make(), make()
    single(namespace, **(options if single_options is None else single_options)).fit(expected, loader(1))
    t = trainer(namespace, world_size, strategy, **options)
    t.fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())
    return module, t


@both_namespaces
@pytest.mark.parametrize("strategy", ["shard", *exhaustive("shard_zero2")])
@ranks(2)
def test_fit_equals_a_single_device(world_size, namespace, strategy):
    module, t = compare(namespace, world_size, strategy=strategy)
    assert t.strategy.engine_or_none is None
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert type(t.strategy).__module__ == f"lightning_shard.for_{namespace}"


@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("hybrid_shard_zero2")])
@ranks(4)
def test_hybrid_on_two_nodes_equals_a_single_device(rank, world_size, strategy):
    """Lightning numbers ranks by node, and says how many a node has."""
    from lightning_shard.for_lightning import ShardStrategy

    class TwoNodes(LightningEnvironment):
        creates_processes_externally = True
        world_size = staticmethod(lambda: 4)
        global_rank = staticmethod(lambda: rank)
        local_rank = staticmethod(lambda: rank % 2)
        node_rank = staticmethod(lambda: rank // 2)

        def teardown(self) -> None:
            """Lightning's own takes WORLD_SIZE out of the environment, which later tests in these processes need."""

    found = []

    class Look(Callback):
        def on_train_start(self, trainer, module):
            found.append(torch_shard.engine_of(module)._runtime.collectives.topology.shard_groups)

    chosen = ShardStrategy(strategy=strategy)
    options = {"num_nodes": 2, "devices": 2, "plugins": [TwoNodes()], "callbacks": [Look()]}
    expected, module = net_class("lightning")(), net_class("lightning")()
    single("lightning").fit(expected, loader(1))
    trainer("lightning", world_size, chosen, **options).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())
    assert found == [((0, 1), (2, 3))]


@pytest.mark.parametrize("defer", [False, *exhaustive(True)], ids=["reduced", "deferred"])
@ranks(2)
def test_accumulation_equals_a_single_device(world_size, defer):
    from lightning_shard.for_lightning import ShardStrategy

    strategy = ShardStrategy(defer_gradient_sync=defer)
    compare("lightning", world_size, strategy=strategy, accumulate_grad_batches=4)


@either_namespace
@pytest.mark.parametrize("algorithm", ["norm", *exhaustive("value")])
@ranks(2)
def test_clipping_equals_a_single_device(world_size, namespace, algorithm):
    limit = 0.3 if algorithm == "norm" else 0.02
    _, t = compare(namespace, world_size, gradient_clip_val=limit, gradient_clip_algorithm=algorithm)
    assert isinstance(t.precision_plugin, ShardedClipping)
    assert type(t.precision_plugin).__qualname__ == "Precision"


@pytest.mark.parametrize("p", [1.0, *exhaustive(math.inf)])
@ranks(2)
def test_clipping_in_configure_gradient_clipping_sees_the_global_norm(world_size, p):
    class Clips(net_class("lightning")):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2, norm_type=p)
            self.seen.append(float(norm))

    module, _ = compare("lightning", world_size, Clips)
    reference = Clips()
    single("lightning").fit(reference, loader(1))
    assert module.seen == pytest.approx(reference.seen, rel=1e-5)


@pytest.mark.parametrize("forward", [*exhaustive(False), True])
@ranks(2)
def test_a_step_that_returns_none_on_all_ranks_is_lightnings_own_error(world_size, forward):
    class Skips(net_class("lightning")):
        skip = True

        def training_step(self, batch, index):
            if index == 2 and self.skip:
                _ = self.loss(batch) if forward else None
                return None
            return super().training_step(batch, index)

    module = Skips()
    with pytest.raises(RuntimeError, match="returning None in distributed training is not supported"):
        trainer("lightning", world_size).fit(module, loader(world_size))
    module.skip = False
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None


@pytest.mark.exhaustive
@either_namespace
@ranks(2)
def test_fit_validate_test_and_predict_in_any_order(rank, world_size, namespace):
    def run(t, world_size):
        module = net_class(namespace)()
        data = loader(world_size)
        found = [t.validate(module, data, verbose=False)[0]["val"]]
        t.fit(module, data, data)
        found.append(float(t.callback_metrics["val"]))
        optimizer = t.optimizers[0]
        found.append(t.test(module, data, verbose=False)[0]["test"])
        found.append(torch.cat(t.predict(module, data)))
        assert t.optimizers[0] is optimizer, "evaluation keeps the optimizers of the fit"
        t.fit_loop.max_epochs = 2
        t.fit(module, data)
        found.append(t.test(module, data, verbose=False)[0]["test"])
        return module, found

    # Double precision: two ranks add in another order.
    expected, (val, fitted, test, predicted, again) = run(single(namespace, precision="64-true"), 1)
    module, found = run(trainer(namespace, world_size, precision="64-true"), world_size)
    assert found[0] == pytest.approx(val) and found[1] == pytest.approx(fitted)
    assert found[2] == pytest.approx(test) and found[4] == pytest.approx(again)
    torch.testing.assert_close(found[3], predicted[rank::world_size])
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_in_fit_the_parameters_are_sharded_and_the_engine_is_reachable(world_size):
    class Looks(net_class("lightning")):
        def on_train_start(self):
            engine = self.trainer.strategy.engine
            assert engine is torch_shard.engine_of(self)
            assert all(isinstance(p, ShardTensor) for p in self.parameters())
            self.held = engine.memory_summary()["parameters"]
            self.whole = sum(p.numel() * p.element_size() for p in self.parameters())
            with engine.gathered(self.inner):
                assert type(self.inner.weight) is nn.Parameter

        def on_before_optimizer_step(self, optimizer):
            self.seen.append(float(torch.stack([p.grad.norm() for p in self.parameters()]).norm()))

    module = Looks()
    t = trainer("lightning", world_size)
    with pytest.raises(RuntimeError, match="no module is sharded now"):
        _ = t.strategy.engine
    t.fit(module, loader(world_size))
    assert module.held < 0.75 * module.whole
    reference = Looks
    expected = reference()
    expected.on_train_start = lambda: None
    single("lightning").fit(expected, loader(1))
    assert module.seen == pytest.approx(expected.seen, rel=1e-5)


@ranks(2)
def test_a_module_that_stays_sharded_is_recognised_by_the_next_run(world_size):
    from lightning_shard.for_lightning import ShardStrategy

    module, expected = net_class("lightning")(), net_class("lightning")()
    t = trainer("lightning", world_size, ShardStrategy(unshard_at_end=False), max_epochs=1)
    t.fit(module, loader(world_size))
    engine = torch_shard.engine_of(module)
    assert engine is not None
    t.test(module, loader(world_size), verbose=False)
    assert torch_shard.engine_of(module) is engine
    second = trainer("lightning", world_size)
    second.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None
    for _ in range(2):
        single("lightning").fit(expected, loader(1))
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_configure_model_on_meta(world_size):
    class Late(late_class("lightning", lambda: nn.Linear(3, 3))):
        def forward(self, x):
            return self.extra(super().forward(x))

    module = Late()
    t = trainer("lightning", world_size)
    t.fit(module, loader(world_size))
    t.test(module, loader(world_size), verbose=False)
    assert module.extra.weight.device.type == "cpu" and bool(module.extra.weight.isfinite().all())


@ranks(2)
def test_init_module_with_empty_init_is_on_meta(world_size):
    t = trainer("lightning", world_size)
    with t.init_module(empty_init=True):
        layer = nn.Linear(2, 2)
    assert layer.weight.device.type == "meta"


@ranks(2)
def test_a_module_made_without_memory_goes_on_from_a_checkpoint_as_on_a_single_device(rank, world_size, tmp_path):
    plain, path = single("lightning"), tmp_path / "plain.ckpt"
    plain.fit(net_class("lightning")(optimizer="adamw"), loader(1))
    if rank == 0:
        plain.save_checkpoint(path)
    torch.distributed.barrier()
    expected = net_class("lightning")(optimizer="adamw")
    single("lightning", max_epochs=2).fit(expected, loader(1), ckpt_path=path)

    def fill(part: nn.Module) -> None:
        for value in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            value.fill_(7.0)

    t = trainer("lightning", world_size, lightning_shard.ShardStrategy(init_fn=fill), max_epochs=2)
    with t.init_module(empty_init=True):
        module = net_class("lightning")(optimizer="adamw")
    assert all(value.is_meta for value in module.state_dict().values())
    t.fit(module, loader(world_size), ckpt_path=path)
    assert_same_state(module.state_dict(), expected.state_dict())


class Doubled(nn.Linear):
    """What the layer plugin of the next test puts in place of a Linear."""


@pytest.mark.exhaustive
@ranks(2)
def test_layer_synchronisation_is_applied_before_sharding_and_reverted(world_size):
    from lightning.pytorch.plugins import LayerSync

    class Swap(LayerSync):
        def apply(self, model):
            assert not any(isinstance(p, ShardTensor) for p in model.parameters())
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.__class__ = Doubled
            return model

        def revert(self, model):
            assert not any(isinstance(p, ShardTensor) for p in model.parameters())
            for module in model.modules():
                if type(module) is Doubled:
                    module.__class__ = nn.Linear
            return model

    class Checks(net_class("lightning")):
        def on_train_start(self):
            assert type(self.inner) is Doubled

    module, t = Checks(), trainer("lightning", world_size, plugins=[Swap()])
    t.fit(module, loader(world_size))
    assert type(module.inner) is nn.Linear
    t.fit_loop.max_epochs = 2
    t.fit(module, loader(world_size))
    assert type(module.inner) is nn.Linear


@ranks(2)
def test_an_exception_in_a_step_leaves_a_module_that_can_be_trained_again(world_size):
    class Fails(net_class("lightning")):
        fail = True

        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if index == 2 and self.fail:
                raise ZeroDivisionError("on purpose")
            return loss

    module = Fails()
    with pytest.raises(ZeroDivisionError):
        trainer("lightning", world_size).fit(module, loader(world_size))
    module.fail = False
    trainer("lightning", world_size).fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is None


@ranks(2, fresh=True)
def test_an_exception_on_one_rank_is_an_error_on_the_others_and_teardown_does_not_wait(rank, world_size):
    class Fails(net_class("lightning")):
        def training_step(self, batch, index):
            if index == 2 and rank == 1:
                raise ZeroDivisionError("on purpose")
            return self.loss(batch)

    strategy = lightning_shard.ShardStrategy(ShardConfig(timeout=2.0))
    started = time.monotonic()
    with pytest.raises(ZeroDivisionError if rank == 1 else ShardError) as caught:
        trainer("lightning", world_size, strategy).fit(Fails(), loader(world_size))
    assert time.monotonic() - started < 15
    if rank == 0:  # a line of the step or the call of fit, none of Lightning
        assert re.search(r"at \S*tests/lightning/\w+\.py:\d+", str(caught.value)), caught.value
        assert "/core/module.py" not in str(caught.value)


@ranks(2)
def test_a_model_that_would_not_fit_stays_sharded(rank, world_size):
    module, t = net_class("lightning")(), trainer("lightning", world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_shard.trainer.memory.free_host_bytes", lambda: 1000 if rank == 1 else 10**12)
        t.fit(module, loader(world_size))
    assert torch_shard.engine_of(module) is not None, "on all ranks, since one has no room"
    t.test(module, loader(world_size), verbose=False)


@ranks(2)
def test_progress_bar_and_summary_count_whole_parameters(world_size):
    from lightning.pytorch.callbacks import Callback, ModelSummary

    class Counts(Callback):
        def on_train_start(self, trainer, module):
            summary = next(c for c in trainer.callbacks if isinstance(c, ModelSummary))._summary(trainer, module)
            assert summary.total_parameters == wanted

    module = net_class("lightning")()
    wanted = sum(p.numel() for p in module.parameters())
    options = {"enable_model_summary": True, "enable_progress_bar": True, "callbacks": [Counts()]}
    trainer("lightning", world_size, **options).fit(module, loader(world_size))


@ranks(2)
def test_finetuning_unfreezes_and_adds_a_group_during_training(world_size):
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.inner)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.inner, optimizer, lr=0.01)

    class Part(net_class("lightning")):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    expected, module = Part(), Part()
    single("lightning", max_epochs=2, callbacks=[Unfreeze()]).fit(expected, loader(1))
    trainer("lightning", world_size, max_epochs=2, callbacks=[Unfreeze()]).fit(module, loader(world_size))
    assert_same_state(module.state_dict(), expected.state_dict())


@ranks(2)
def test_the_trainer_deals_samples_out_to_the_ranks(rank, world_size):
    t = trainer("lightning", world_size, use_distributed_sampler=True)
    module = net_class("lightning")()
    predicted = torch.cat(t.predict(module, loader(1)))
    torch.testing.assert_close(predicted, torch.cat(single("lightning").predict(module, loader(1)))[rank::world_size])
    assert t.strategy.distributed_sampler_kwargs == {"num_replicas": world_size, "rank": rank}


@ranks(2)
def test_metrics_in_a_module_are_reduced_over_the_ranks(world_size):
    from torchmetrics import MeanMetric

    class Measures(net_class("lightning")):
        def __init__(self):
            super().__init__()
            self.mean = MeanMetric()

        def validation_step(self, batch, index):
            self.mean.update(self.loss(batch))
            self.log("mean", self.mean)

    value = trainer("lightning", world_size).validate(Measures(), loader(world_size), verbose=False)[0]["mean"]
    assert value == pytest.approx(single("lightning").validate(Measures(), loader(1), verbose=False)[0]["mean"])
