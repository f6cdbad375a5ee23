"""torch's settings of offloading: parameters, gradients and optimizer state of the whole model in host memory."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

import torch_shard.fsdp
from tests.compat.harness import Block, batch
from tests.fsdp.programs import build, fsdp2, loss_of, same_as_plain, sgd
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Offload, engine_of
from torch_shard.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy, fully_shard, translate_settings
from torch_shard.fsdp import FullyShardedDataParallel as FSDP
from torch_shard.fsdp.wrap import ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})


def by_class(offload=True, **arguments):
    return FSDP(build(), cpu_offload=CPUOffload(offload_params=offload), **arguments)


def by_function(policy=None, **arguments):
    return fsdp2(torch_shard.fsdp, offload_policy=CPUOffloadPolicy() if policy is None else policy, **arguments)


MODELS = {
    "fsdp1": lambda: by_class(auto_wrap_policy=BLOCKS),
    "fsdp1 without a policy": by_class,
    "fsdp2": by_function,
    "fsdp2 kept": lambda: by_function(reshard_after_forward=False),
}


def on_host(engine):
    return all(flat.host is not None for unit in engine.units for flat in unit.flats)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", *exhaustive("fsdp1 without a policy", "fsdp2 kept")])
@ranks(2)
def test_it_trains_as_plain_training_with_all_of_it_in_host_memory(rank, name):
    model = MODELS[name]()
    same_as_plain(model, rank)
    engine = engine_of(model)
    assert engine.config.offload == Offload() and on_host(engine)


@ranks(2)
def test_memory_need_not_be_page_locked(rank):
    model = by_function(CPUOffloadPolicy(pin_memory=False))
    model(batch(rank, 0))
    assert engine_of(model).config.offload == Offload(pin_memory=False)


@ranks(2)
def test_what_says_nothing_offloads_nothing(rank):
    for model in (by_class(offload=False), by_function(OffloadPolicy()), fully_shard(build(), offload_policy=None)):
        model(batch(rank, 0))
        assert engine_of(model).config.offload is None and not on_host(engine_of(model))


@pytest.mark.parametrize("name", [*exhaustive("fsdp1"), "fsdp2"])
@ranks(2)
def test_accumulation_and_clipping_are_those_without(rank, name):
    found = []
    without = by_class(False, auto_wrap_policy=BLOCKS) if name == "fsdp1" else by_function(OffloadPolicy())
    for model in (without, MODELS[name]()):
        optimizer, norms = sgd(model), []
        for step in range(3):
            for micro in range(2):
                if name == "fsdp2":
                    model.set_requires_gradient_sync(micro == 1)
                with model.no_sync() if name == "fsdp1" and micro == 0 else contextlib.nullcontext():
                    loss_of(model, batch(rank, 2 * step + micro)).backward()
            clip = torch.nn.utils.clip_grad_norm_ if name == "fsdp2" else lambda _, limit: model.clip_grad_norm_(limit)  # noqa: B023
            norms.append(float(clip(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        found.append((norms, whole(model)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-14)
    assert min(found[0][0]) > 0.1


@pytest.mark.parametrize("name", ["fsdp1", *exhaustive("fsdp2")])
@ranks(2)
def test_state_dicts_are_those_after_the_step_and_load(rank, name):
    model, other = MODELS[name](), MODELS[name]()
    loss_of(model, batch(rank, 0)).backward()
    before = {key: value.clone() for key, value in whole(model).items()}
    sgd(model).step()
    after = whole(model)
    assert any(not torch.equal(before[key], value) for key, value in after.items())
    set_model_state_dict(other, after, options=StateDictOptions(full_state_dict=True))
    for key, value in whole(other).items():
        assert torch.equal(value, after[key]), key
    assert torch.equal(model(batch(rank, 1)), other(batch(rank, 1)))


def whole(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize("outer", [*exhaustive(True), False])
@ranks(2)
def test_where_a_part_asks_for_it_all_of_the_model_is_offloaded_and_a_warning_says_so(rank, outer):
    translate_settings.warn_once.cache_clear()
    model = build()
    fully_shard(model.blocks[0], **({} if outer else {"offload_policy": CPUOffloadPolicy()}))
    fully_shard(model, **({"offload_policy": CPUOffloadPolicy()} if outer else {}))
    with captured_log() as messages:
        same_as_plain(model, rank)
    assert on_host(engine_of(model))
    if rank == 0:  # the logger is silent on the others
        assert ("no offload of blocks.0" if outer else "no offload of the outermost module") in messages[0]


@ranks(2)
def test_of_a_model_all_memory_is_page_locked_or_none(rank):
    model = build()
    fully_shard(model.blocks[0], offload_policy=CPUOffloadPolicy())
    fully_shard(model.blocks[1], offload_policy=CPUOffloadPolicy(pin_memory=False))
    fully_shard(model)
    model(batch(rank, 0))
    assert engine_of(model).config.offload == Offload(pin_memory=False)
