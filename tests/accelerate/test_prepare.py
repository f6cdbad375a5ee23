"""``prepare``: in any order, in any number of calls, of any number of objects, and of all of them or of none."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import BOTH, OURS, STOCK, accelerator, engine_of
from tests.accelerate.support.models import FEATURES, Layer, loader, net, sgd
from tests.accelerate.support.training import assert_same, steps
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import SetupError, ShardError


def objects():
    model = net()
    optimizer = sgd(model.parameters())
    return model, optimizer, loader(), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def model_first(acc, model, optimizer, data, scheduler):
    return acc.prepare(model, optimizer, data, scheduler)


def one_by_one(acc, model, optimizer, data, scheduler):
    optimizer = acc.prepare(optimizer)
    data = acc.prepare_data_loader(data)
    scheduler = acc.prepare(scheduler)
    return acc.prepare_model(model), optimizer, data, scheduler


def optimizer_after(acc, model, optimizer, data, scheduler):
    model = acc.prepare(model)
    optimizer = sgd(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return model, *acc.prepare(optimizer, data, scheduler)


def twice(acc, *given):
    return acc.prepare(*acc.prepare(*given))


@pytest.mark.parametrize("way", [one_by_one, optimizer_after, *exhaustive(twice)])
@ranks(2)
def test_every_order_trains_as_ddp_does(way):
    results = []
    for kind, prepare in ((STOCK, model_first), (OURS, way)):
        with accelerator(kind) as acc:
            model, optimizer, data, scheduler = prepare(acc, *objects())
            assert len(acc._models) == len(acc._optimizers) == len(acc._schedulers) == 1
            results.append((steps(acc, model, optimizer, data, scheduler), scheduler.get_last_lr()))
    assert_same(results[1][0], results[0][0])
    assert results[1][1] == results[0][1]


@ranks(2)
def test_prepare_returns_the_same_model_shards_it_once_and_again_after_its_engine_was_closed():
    with accelerator() as acc:
        model = net()
        prepared = acc.prepare(model)
        assert prepared is model and acc.unwrap_model(prepared) is model
        engine = engine_of(model)
        assert acc.prepare(model) is model and engine_of(model) is engine and acc._models == [model]
        engine.close()
        acc.free_memory()
        assert acc.prepare(model) is model and engine_of(model) is not engine and acc._models == [model]


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_a_model_that_is_only_evaluated_is_sharded_and_right(frozen):
    x = torch.randn(3, FEATURES)
    with accelerator() as acc, torch.no_grad():
        model = net().eval().requires_grad_(not frozen)
        wanted = model(x)
        prepared = acc.prepare_model(model, evaluation_mode=not frozen)
        torch.testing.assert_close(prepared(x), wanted)
        total = sum(p.numel() for p in model.parameters()) * 4
        assert engine_of(prepared).memory_summary()["parameters"] < 0.6 * total


# -- a prepare that fails ---------------------------------------------------------------------------------------------
class Sparse(nn.Module):
    """Something that can't be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


@ranks(2)
def test_after_a_prepare_that_fails_nothing_counts_as_prepared_and_all_can_be_prepared_again():
    results = []
    for fails in (False, True):
        with accelerator(mixed_precision="bf16") as acc:
            model, optimizer, data, scheduler = objects()
            if fails:
                with pytest.raises(ShardError, match=r"sparse|layout"):
                    acc.prepare(scheduler, model, optimizer, data, Sparse())
                assert not (acc._models or acc._optimizers or acc._schedulers or acc._dataloaders)
            model, optimizer, data = acc.prepare(model, optimizer, data)
            assert acc._models == [model]
            results.append(steps(acc, model, optimizer, data))
    assert_same(results[1], results[0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@ranks(2)
def test_a_prepare_that_fails_on_one_rank_leaves_a_model_to_prepare_again(rank, error, monkeypatch):
    def mistaken(*args, **kwargs):
        raise error("a mistake")

    plugin = ShardPlugin(activation_checkpointing=[Layer])
    with accelerator(OURS, shard_plugin=plugin, mixed_precision="bf16") as acc:
        model = net()
        with monkeypatch.context() as patched:
            if rank == 1:
                patched.setattr(acc, "prepare_data_loader", mistaken)  # comes after models
                with pytest.raises(error, match="mistake"):
                    acc.prepare(model, loader())
                assert not acc._models
            else:
                acc.prepare(model, loader())
        prepared = acc.prepare(model, sgd(model.parameters()), loader())
        assert engine_of(model) is not None and all("forward" in layer.__dict__ for layer in model.layers)
        steps(acc, *prepared)


@ranks(2)
def test_models_that_share_a_module_are_refused_with_what_to_do():
    with accelerator() as acc:
        first, second = net(), net(1)
        second.embed = first.embed
        with pytest.raises(SetupError, match=r"embed\.weight is already sharded.*put both into one nn\.Module"):
            acc.prepare(first, second)
        assert not acc._models


# -- several Accelerators ---------------------------------------------------------------------------------------------
@ranks(2)
def test_a_later_accelerator_without_settings_has_those_of_the_first():
    plugin = ShardPlugin(strategy="shard_grad_op")
    with accelerator(shard_plugin=plugin) as acc:
        later = OURS(cpu=True)
        assert later.shard_plugin is plugin
        model = acc.prepare(net())
        assert later.prepare(model) is model and later._models == [model]
        other = OURS(cpu=True, shard_plugin=ShardPlugin(strategy="no_shard"))
        assert engine_of(other.prepare(net())).config.strategy == "no_shard"
    with accelerator() as acc:
        assert acc.shard_plugin == ShardPlugin()


# -- the end ----------------------------------------------------------------------------------------------------------
@ranks(2)
def test_models_that_were_freed_are_gone():
    with accelerator(mixed_precision="bf16") as acc:
        model, optimizer, data, scheduler = acc.prepare(*objects())
        steps(acc, model, optimizer, data, scheduler)
        gone = [weakref.ref(engine_of(model)), weakref.ref(model), weakref.ref(optimizer)]
        model, optimizer, data, scheduler = acc.free_memory(model, optimizer, data, scheduler)
        gc.collect()
        assert [ref() for ref in gone] == [None, None, None]
        assert acc.step == 0 and not acc._models


@ranks(2)
def test_a_model_trains_on_after_free_memory_forgot_it():
    results = []
    for kind in (STOCK, OURS):
        with accelerator(kind) as acc:
            model, optimizer, data = acc.prepare(*objects()[:3])
            steps(acc, model, optimizer, data)
            plain = acc.unwrap_model(model)
            acc.free_memory()
            again, optimizer, data = acc.prepare(plain, sgd(plain.parameters()), loader())
            results.append(steps(acc, again, optimizer, data))
    assert_same(results[1], results[0])


@ranks(2)
def test_a_model_that_was_saved_whole_or_closed_is_prepared_anew_by_stock_accelerate(tmp_path):
    with accelerator() as acc:
        model = acc.prepare(net())
        for name in ("sharded", "closed"):
            if name == "closed":
                engine_of(model).close()
            if acc.is_main_process:
                torch.save(acc.unwrap_model(model), tmp_path / name)
            acc.wait_for_everyone()
    with accelerator(STOCK) as acc:
        loaded = [torch.load(tmp_path / name, weights_only=False) for name in ("sharded", "closed")]
        for plain in (*loaded, model):
            assert isinstance(acc.prepare(plain), DistributedDataParallel)
        assert not any("_is_accelerate_prepared" in vars(plain) for plain in loaded)


# -- one process ------------------------------------------------------------------------------------------------------
def test_without_a_launcher_it_works_as_one_rank():
    assert not dist.is_initialized()
    results = []
    for kind in (STOCK, OURS):
        with accelerator(kind) as acc:
            assert acc.num_processes == 1
            model, optimizer, data, scheduler = acc.prepare(*objects())
            results.append(steps(acc, model, optimizer, data, scheduler))
    assert_same(results[1], results[0])


# -- what Accelerate does beside preparing is unchanged ---------------------------------------------------------------
@ranks(2)
def test_gather_for_metrics_gives_each_example_once():
    """Before training, and with a last batch that is not full."""
    results = []
    for kind in BOTH:
        with accelerator(kind) as acc:
            model, data = acc.prepare(net().eval(), loader(21))
            with torch.no_grad():
                gathered = [acc.gather_for_metrics((model(x), y)) for x, y in data]
            results.append([torch.cat(parts) for parts in zip(*gathered, strict=True)])
    assert len(results[1][1]) == 21
    torch.testing.assert_close(results[1], results[0])


@ranks(2)
def test_the_accelerator_copies_as_itself_and_pickles_as_stock_does():
    for kind in BOTH:
        with accelerator(kind) as acc:
            assert copy.deepcopy(acc) is acc
            again = pickle.loads(pickle.dumps(acc))
            assert type(again) is kind and again.num_processes == 2
            if kind is OURS:
                assert again.shard_plugin == acc.shard_plugin


@ranks(2)
def test_unwrap_model_takes_the_mixed_precision_off_as_stock_does():
    for kind in BOTH:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model = net()
            plain_forward = model.forward.__func__
            prepared = acc.prepare(model)
            assert acc.unwrap_model(prepared) is model
            assert model.forward.__func__ is not plain_forward
            assert acc.unwrap_model(prepared, keep_fp32_wrapper=False) is model
            assert model.forward.__func__ is plain_forward
            assert model(torch.ones(2, FEATURES)).dtype == torch.float32
