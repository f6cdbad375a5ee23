"""Ranks that are far apart, as under DDP, and ranks that do different things, which hear of it at once."""

from __future__ import annotations

import pickle
import time
from datetime import timedelta

import accelerate
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import torch_shard
from accelerate_shard import ShardPlugin
from tests.accelerate.support.accelerators import BOTH, accelerator, engine_of
from tests.accelerate.support.models import loader, loss_of, net, sgd
from tests.support.inside import runtime_of
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import ShardConfig
from torch_shard.comm import rendezvous, watchdog
from torch_shard.comm.process_groups import group_timeout
from torch_shard.errors import ConfigError, DivergenceError, MissingRankError

CPU = torch.device("cpu")


def timeout_of(acc) -> float:
    return engine_of(acc.prepare(net())).config.timeout


# -- which timeout --------------------------------------------------------------------------------------------------------
@ranks(2)
def test_by_default_ranks_wait_as_long_as_the_process_group_does():
    """120 s in these tests. Chosen ones count, also those of a plain ShardConfig."""
    with accelerator() as acc:
        assert timeout_of(acc) == group_timeout(CPU) == 120
    for plugin in (ShardPlugin(timeout=7), ShardConfig(timeout=7)):
        with accelerator(shard_plugin=plugin) as acc:
            assert timeout_of(acc) == 7
    with accelerator(shard_plugin=ShardConfig(prefetch=2)) as acc:
        assert timeout_of(acc) == 120


@ranks(2, fresh=True, group_timeout=4000)
def test_the_engines_own_groups_wait_longer_than_the_engine():
    with accelerator() as acc:
        engine = engine_of(acc.prepare(net()))
        assert engine.config.timeout == 4000
        for channel in runtime_of(engine).collectives.watchdog.channels.values():
            group = channel.group
            assert group._get_backend(CPU).options._timeout == timedelta(seconds=4060)


def test_without_a_process_group_it_is_torchs_default_and_what_is_no_time_is_refused():
    with accelerator() as acc:
        assert timeout_of(acc) == group_timeout(CPU) == 1800
    for value in (0, -1.0, "30", float("inf"), True):
        with pytest.raises(ConfigError, match="timeout"):
            ShardPlugin(timeout=value)
    assert ShardPlugin().timeout is None and ShardPlugin().config().timeout == ShardConfig().timeout == 30


# -- one rank at work ---------------------------------------------------------------------------------------------------
@pytest.mark.exhaustive
@ranks(2)
def test_a_main_process_that_works_alone_is_waited_for_with_a_warning(rank):
    slow = watchdog.SLOW
    watchdog.SLOW, rendezvous.SLOW = 1.5, 0.3
    try:
        with captured_log() as seen, accelerator() as acc:
            model = net()
            if rank == 0:
                time.sleep(1)
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(16))
            for number, batch in enumerate(data):
                if number == 1 and acc.is_main_process:
                    time.sleep(3)
                acc.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    finally:
        watchdog.SLOW = rendezvous.SLOW = slow
    if rank == 1:
        (prepare,) = [line for line in seen if "rank 1 has waited 0.3 s in Accelerator.prepare at" in line]
        assert "tests/accelerate" in prepare and "for ranks [0]" in prepare
        (forward,) = [line for line in seen if "rank 1 has waited 1.5 s in the start of a forward at" in line]
        assert "tests/accelerate" in forward and "rank 0 is not waiting in an operation of the engine" in forward


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_wait_for_everyone_waits_for_longer_than_a_short_timeout_which_counts_again_afterwards(rank):
    with accelerator() as acc:
        model = acc.prepare(net())
        runtime_of(engine_of(model)).collectives.watchdog._timeout = 1.0  # set-up may take longer
        if acc.is_main_process:
            time.sleep(2.5)
        acc.wait_for_everyone()
        loss_of(model, next(iter(loader()))).backward()
        acc.wait_for_everyone()
        if rank == 0:
            time.sleep(2)
        with pytest.raises(MissingRankError, match="rank 1 waited 1 s in the start of a forward"):
            loss_of(model, next(iter(loader())))


# -- ranks that do different things ---------------------------------------------------------------------------------------
CALLS = {
    "save_state": lambda acc, model, folder: acc.save_state(folder),
    "load_state": lambda acc, model, folder: acc.load_state(folder),
    "get_state_dict": lambda acc, model, folder: acc.get_state_dict(model),
    "save_model": lambda acc, model, folder: acc.save_model(model, folder),
    "forward": lambda acc, model, folder: model(torch.ones(2, 12)),
    "clip": lambda acc, model, folder: acc.clip_grad_norm_(model.parameters(), 1.0),
    "wait_for_everyone": lambda acc, model, folder: acc.wait_for_everyone(),
}


@pytest.mark.parametrize(
    ("alone", "others"),
    [
        ("load_state", "wait_for_everyone"),
        *exhaustive(
            ("load_state", "forward"),
            ("forward", "wait_for_everyone"),
            ("clip", "wait_for_everyone"),
        ),
    ],
)
@ranks(2, fresh=True)
def test_something_collective_on_the_main_process_alone_is_an_error_at_once_that_changes_no_file(
    alone, others, tmp_path
):
    with accelerator() as acc:
        model, _ = acc.prepare(net(), sgd(net().parameters()))
        acc.save_state(tmp_path / "state")
        before = listed(tmp_path)
        begin = time.monotonic()
        with pytest.raises(
            DivergenceError, match=r"(?s)rank [01].*tests/accelerate/.*rank [01].*tests/accelerate/"
        ) as caught:
            CALLS[alone if acc.is_main_process else others](acc, model, tmp_path / "state")
            acc.wait_for_everyone()
        assert time.monotonic() - begin < 8 and str(caught.value).count("tests/accelerate/") == 2
        for name in (alone, others):
            assert name in ("forward", "clip") or name in str(caught.value)
        assert listed(tmp_path) == before


@pytest.mark.parametrize("others", ["wait_for_everyone", "forward"])
@ranks(2)
def test_the_main_process_saves_a_model_alone(others, tmp_path):
    with accelerator() as acc:
        model, optimizer = acc.prepare(net(), sgd(net().parameters()))
        together = acc.get_state_dict(model)
        for number in range(2):
            if acc.is_main_process:
                alone = acc.get_state_dict(model)
                assert all(torch.equal(alone[name], value) for name, value in together.items())
                acc.save_model(model, tmp_path / f"{number}")
                assert load_file(tmp_path / f"{number}" / "model.safetensors").keys() == together.keys()
            else:
                CALLS[others](acc, model, tmp_path)
            if acc.is_main_process:
                CALLS[others](acc, model, tmp_path)
        optimizer.zero_grad()


def listed(folder):
    return sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*"))


class Waits(nn.Module):
    def __init__(self, acc) -> None:
        super().__init__()
        self.net, self.waits = net(), [acc.wait_for_everyone]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.waits[0]()
        return self.net(x)


@ranks(2)
def test_wait_for_everyone_is_a_barrier_wherever_stock_allows_one(rank):
    """Without models, in a forward and a backward, between micro-batches, after a forward that failed, on a closed engine."""
    for kind in BOTH:
        with accelerator(kind, gradient_accumulation_steps=2) as acc:
            acc.wait_for_everyone()
            model = Waits(acc)
            model.net.head.weight.register_hook(lambda grad: acc.wait_for_everyone())
            model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader(16))
            for batch in data:
                with acc.accumulate(model):
                    acc.backward(loss_of(model, batch))
                    acc.wait_for_everyone()
                    optimizer.step()
                    optimizer.zero_grad()
            with pytest.raises(RuntimeError, match="shape"):
                model(torch.ones(2, 3))
            acc.wait_for_everyone()
            engine = torch_shard.engine_of(model)
            if engine is not None:
                engine.close(optimizer.optimizer)
                acc.wait_for_everyone()
            acc.free_memory()
            acc.wait_for_everyone()


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_wait_for_everyone_stays_a_barrier_after_an_engine_was_given_up(rank):
    with accelerator(shard_plugin=ShardPlugin(timeout=2.0)) as acc:
        model = acc.prepare(net())
        if rank == 0:
            with pytest.raises(MissingRankError):
                model(torch.ones(2, 12))
        dist.barrier()
        acc.free_memory()
        acc.wait_for_everyone()


@ranks(2, fresh=True)
def test_a_rank_that_still_reads_gathered_parameters_waits_for_those_that_do_not(rank):
    with accelerator() as acc:
        model = acc.prepare(net())
        with engine_of(model).gathered(ranks=0):
            if rank == 0:
                acc.wait_for_everyone()
        if rank == 1:
            acc.wait_for_everyone()
        model(torch.ones(2, 12))


@ranks(2)
def test_wait_for_everyone_stays_a_barrier_where_ranks_can_not_be_compared_any_more(rank, monkeypatch):
    with accelerator() as acc:
        model = acc.prepare(net())
        groups = runtime_of(engine_of(model)).collectives.watchdog.channels["control"].groups
        monkeypatch.setattr(groups, "broken", "a rank has stopped at an error")
        with pytest.raises(DivergenceError, match="a rank has stopped at an error"):
            model(torch.ones(2, 12))
        acc.wait_for_everyone()
        monkeypatch.undo()


@ranks(2)
def test_a_rank_that_begins_a_shuffled_dataloader_while_another_computes_hears_of_it_at_once(rank):
    with accelerator() as acc:
        model, data = acc.prepare(net(), loader(shuffle=True))
        for batch in data:
            loss_of(model, batch).backward()
        copied = pickle.loads(pickle.dumps(data.rng_types))
        assert copied == ["generator"] and type(copied) is list
        begin = time.monotonic()
        with pytest.raises(DivergenceError, match="the beginning of a dataloader"):
            if rank == 0:
                model(torch.ones(2, 12))
            else:
                next(iter(data))
        assert time.monotonic() - begin < 20


@ranks(2)
def test_the_main_process_samples_while_the_others_begin_a_shuffled_dataloader(rank):
    with accelerator() as acc:
        model, data = acc.prepare(net(), loader(shuffle=True))
        for _ in range(2):
            for batch in data:
                loss_of(model, batch).backward()
            if acc.is_main_process:
                with torch.no_grad():
                    assert model(torch.ones(2, 12)).isfinite().all()


def first(acc):
    with acc.main_process_first():
        pass


WAITS = {
    "wait_for_everyone": lambda acc: acc.wait_for_everyone(),
    "main_process_first": first,
    "gather": lambda acc: acc.gather(torch.ones(2)),
    "gather_for_metrics": lambda acc: acc.gather_for_metrics(["an object"], use_gather_object=True),
    "reduce": lambda acc: acc.reduce(torch.ones(2)),
    "pad_across_processes": lambda acc: acc.pad_across_processes(torch.ones(2)),
    "check_trigger": lambda acc: acc.check_trigger(),
    "broadcast": lambda acc: accelerate.utils.broadcast(torch.ones(2)),
    "broadcast_object_list": lambda acc: accelerate.utils.broadcast_object_list([1]),
}


@pytest.mark.parametrize("where", quick(WAITS, ["gather"]))
@ranks(2)
def test_the_main_process_samples_at_once_while_the_others_wait_in_something_of_accelerates(where):
    with accelerator(shard_plugin=ShardPlugin(alone_after=30.0)) as acc:
        model = acc.prepare(net())
        for _ in range(2):
            begin = time.monotonic()
            if acc.is_main_process:
                with torch.no_grad():
                    model(torch.ones(2, 12))
            WAITS[where](acc)
            assert time.monotonic() - begin < 5
        assert engine_of(model).statistics().lone_reads == (2 if acc.is_main_process else 0)
