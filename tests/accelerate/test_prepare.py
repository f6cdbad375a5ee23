"""``prepare``: in any order, in any number of calls, of any number of objects, and of all of them or of none."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import (
    FEATURES,
    OURS,
    STOCK,
    Layer,
    Result,
    accelerator,
    assert_same,
    dataset,
    engine_of,
    full_parameters,
    loader,
    loss_of,
    net,
    sgd,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Engine
from torch_shard.errors import SetupError, ShardError


def steps(acc, model, optimizer, data, scheduler=None):
    """One epoch; what :func:`train` returns."""
    result = Result()
    for batch in data:
        value = loss_of(model, batch)
        acc.backward(value)
        result.norms.append(float(acc.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        result.losses.append(value.item())
    result.parameters = full_parameters(acc.unwrap_model(model))
    return result


def objects():
    model = net()
    optimizer = sgd(model.parameters())
    return model, optimizer, loader(), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def model_first(acc, model, optimizer, data, scheduler):
    return acc.prepare(model, optimizer, data, scheduler)


def scheduler_first(acc, model, optimizer, data, scheduler):
    scheduler, data, optimizer, model = acc.prepare(scheduler, data, optimizer, model)
    return model, optimizer, data, scheduler


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


@pytest.mark.parametrize(
    "way", [model_first, *exhaustive(scheduler_first, one_by_one), optimizer_after, *exhaustive(twice)]
)
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
def test_prepare_returns_the_same_model_and_a_model_prepared_again_is_left_as_it_is():
    with accelerator() as acc:
        model = net()
        prepared = acc.prepare(model)
        assert prepared is model and acc.unwrap_model(prepared) is model
        engine = engine_of(model)
        assert acc.prepare(model) is model and engine_of(model) is engine and acc._models == [model]


@ranks(2)
def test_a_model_that_is_only_evaluated_is_sharded_and_right():
    x = torch.randn(3, FEATURES)
    for frozen, options in ((False, {"evaluation_mode": True}), (True, {})):
        with accelerator() as acc:
            model = net().eval()
            if frozen:
                model.requires_grad_(False)
            with torch.no_grad():
                wanted = model(x)
            prepared = acc.prepare_model(model, **options)
            with torch.no_grad():
                torch.testing.assert_close(prepared(x), wanted)
            total = sum(p.numel() for p in model.parameters()) * 4
            assert engine_of(prepared).memory_summary()["parameters"] < 0.6 * total


@ranks(2)
def test_a_model_that_was_given_back_by_its_engine_can_be_prepared_again():
    with accelerator() as acc:
        model = acc.prepare(net())
        engine_of(model).close()
        assert engine_of_or_none(model) is None
        acc.free_memory()
        prepared = acc.prepare(model)
        assert engine_of(prepared) is not None and acc._models == [model]


def engine_of_or_none(model: nn.Module) -> Engine | None:
    return torch_shard.engine_of(model)


# -- a prepare that fails ---------------------------------------------------------------------------------------------
class Sparse(nn.Module):
    """Something that can't be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


@pytest.mark.parametrize("mixed_precision", ["no", *exhaustive("bf16")])
@ranks(2)
def test_after_a_prepare_that_fails_nothing_counts_as_prepared_and_all_can_be_prepared_again(mixed_precision):
    results = []
    for fails in (False, True):
        with accelerator(mixed_precision=mixed_precision) as acc:
            model, optimizer, data, scheduler = objects()
            if fails:
                with pytest.raises(ShardError, match=r"sparse|layout"):
                    acc.prepare(scheduler, model, optimizer, data, Sparse())
                assert not (acc._models or acc._optimizers or acc._schedulers or acc._dataloaders)
            model, optimizer, data = acc.prepare(model, optimizer, data)
            assert acc._models == [model]
            results.append(steps(acc, model, optimizer, data))
    assert_same(results[1], results[0])


class Faulty(DataLoader):
    """A loader of the user's with a mistake, which ``prepare`` comes upon after the models."""

    error: Exception | None = AttributeError("no such thing")

    @property
    def batch_sampler(self):
        if self.error is not None and "_ready" in self.__dict__:
            raise self.error
        return self.__dict__["_sampler"]

    @batch_sampler.setter
    def batch_sampler(self, value):
        self.__dict__["_sampler"] = value


def faulty(error: Exception) -> DataLoader:
    found = Faulty(dataset(8), batch_size=4)
    found.error = error
    found._ready = True
    return found


class Saves(nn.Module):
    """A model with a method of a library that sharding replaces, and layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def save_pretrained(self, folder: str) -> None:
        """As transformers has it."""


def is_whole_and_prepared(model: Saves) -> bool:
    """Whether everything that belongs to a sharded model is there."""
    return "save_pretrained" in model.__dict__ and all("forward" in layer.__dict__ for layer in model.net.layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@ranks(2)
def test_a_prepare_that_fails_on_one_rank_leaves_a_model_to_prepare_again(rank, error):
    plugin = ShardPlugin(activation_checkpointing=[Layer])
    with accelerator(OURS, shard_plugin=plugin, mixed_precision="bf16") as acc:
        model = Saves()
        if rank == 1:
            with pytest.raises(error, match="mistake"):
                acc.prepare(model, faulty(error("a mistake")))
            assert not acc._models
        else:
            acc.prepare(model, loader())
        model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader())
        assert is_whole_and_prepared(model) and engine_of(model) is not None
        for batch in data:
            acc.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_models_that_share_a_module_are_refused_with_what_to_do():
    with accelerator() as acc:
        first, second = net(), net(1)
        second.embed = first.embed
        with pytest.raises(SetupError, match=r"embed\.weight is already sharded.*put both into one nn\.Module"):
            acc.prepare(first, second)
        assert not acc._models


@ranks(2)
def test_a_compiler_that_does_not_exist_leaves_nothing_half_done():
    with accelerator(dynamo_backend="inductor") as acc:
        acc.state.dynamo_plugin.mode = "no such mode"
        model = net()
        with pytest.raises(RuntimeError):
            acc.prepare(model)
        assert not acc._models and "_is_accelerate_prepared" not in model.__dict__


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
@pytest.mark.parametrize("method", ["free_memory", *exhaustive("clear")])
@ranks(2)
def test_models_that_were_freed_are_gone(method):
    with accelerator(mixed_precision="bf16") as acc:
        model, optimizer, data, scheduler = acc.prepare(*objects())
        steps(acc, model, optimizer, data, scheduler)
        gone = [weakref.ref(engine_of(model)), weakref.ref(model), weakref.ref(optimizer)]
        model, optimizer, data, scheduler = getattr(acc, method)(model, optimizer, data, scheduler)
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


# -- one process ------------------------------------------------------------------------------------------------------
def test_without_a_launcher_it_works_as_one_rank():
    assert not dist.is_initialized()
    results = []
    for kind in (STOCK, OURS):
        with contextlib.ExitStack() as stack:
            acc = stack.enter_context(accelerator(kind))
            assert acc.num_processes == 1
            model, optimizer, data, scheduler = acc.prepare(*objects())
            results.append(steps(acc, model, optimizer, data, scheduler))
    assert_same(results[1], results[0])
