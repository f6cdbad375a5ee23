"""What an engine says about itself: bytes, waiting, gathered memory, norms of units' gradients."""

from __future__ import annotations

import copy
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.collectives import Collectives
from tests.support.marks import exhaustive
from tests.support.odd_model import trained
from tests.support.ranks import ranks
from torch_shard.comm.process_groups import ProcessGroups
from torch_shard.comm.streams import Streams
from torch_shard.comm.traffic_statistics import StreamWaits, waits
from torch_shard.comm.watchdog import Watchdog
from torch_shard.comm.work import Channel, Pending
from torch_shard.errors import ConfigError, ShardError

LATE = 0.15  # seconds
LAYER = 8 * 8 * 4  # bytes


class Row(nn.Module):
    """Layers of one size, a unit each."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def shard(model: nn.Module, **config: Any) -> torch_shard.Engine:
    return torch_shard.shard(model, units=["layers.*"], **config)


def step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()


def sleep(*_: Any) -> None:
    time.sleep(LATE)


def waited_for(kind: str, late: str, rank: int, **config: Any) -> bool:
    """Whether, in one of three steps in which rank 1 is late somewhere, rank 0 waited for `kind` and for nothing else. (A busy
    machine may have it wait for other things in some of them.)"""
    model = Row()
    engine = shard(model, **config)
    step(model)
    if rank == 1 and late == "forward":
        model.layers[1].register_forward_hook(sleep)
    found = []
    for _ in range(3):
        before = engine.statistics()
        if rank == 1 and late == "before":
            sleep()
        step(model)
        step_waits = engine.statistics().since(before)
        others = {"gather_wait", "reduce_wait", "other_wait"} - {kind}
        found.append(getattr(step_waits, kind) > LATE / 2 > max(getattr(step_waits, name) for name in others))
    return any(found)


@ranks(2)
def test_waiting_for_a_rank_that_gathers_late_is_waiting_for_gathers(rank: int) -> None:
    assert waited_for("gather_wait", "forward", rank, prefetch=0) or rank == 1


class SlowWork:
    """A collective over Gloo that takes its time."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("purpose", "kind"),
    [
        ("all-gather", "gather"),
        ("reduce", "reduction"),
        ("control", "other"),
        ("scalar", "other"),
    ],
)
@pytest.mark.parametrize("suffix", ["", " 0"])
@pytest.mark.parametrize("how", ["wait", "settle"])
def test_waiting_counts_by_what_is_waited_for(purpose: str, kind: str, suffix: str, how: str) -> None:
    watch = Watchdog(0, [0, 1], 30.0, "")
    groups = ProcessGroups([0, 1], made=dict.fromkeys(("all-gather", "reduce", "control", "scalar")))
    for name in list(groups.made):
        watch.channels[name] = Channel(name, groups, [0, 1])
        watch.channels[f"{name} 0"] = Channel(name, groups, [0, 1], "0", shares=watch.channels[name])
    pending = Pending(watch, watch.channels[purpose + suffix], 1, "a collective", SlowWork())
    if how == "wait":
        pending.wait()
    else:
        assert pending.wait_at_most(1.0)
    found = dict(zip(("gather", "reduction", "other"), waits(SimpleNamespace(watchdog=watch)), strict=True))  # type: ignore[arg-type]
    assert found.pop(kind) > 0.015
    assert set(found.values()) == {0.0}


@pytest.mark.exhaustive
@ranks(2)
def test_waiting_for_a_rank_that_begins_late_is_not_waiting_for_the_network(rank: int) -> None:
    assert waited_for("other_wait", "before", rank) or rank == 1


@pytest.mark.parametrize(
    ("config", "peak"),
    [
        ({"prefetch": 1}, 2 * LAYER),
        *exhaustive(({"prefetch": 2}, 3 * LAYER)),
        ({"strategy": "shard_grad_op"}, 5 * LAYER),
        ({"strategy": "no_shard"}, 0),
    ],
)
@ranks(2)
def test_gathered_bytes_now_and_at_most(config: dict[str, Any], peak: int) -> None:
    model = Row()
    engine = shard(model, **config)
    assert engine.statistics().peak_gathered == 0
    for _ in range(3):
        step(model)
    found = engine.statistics()
    assert (found.gathered, found.peak_gathered) == (0, peak)
    engine.reset_peak_gathered()
    assert engine.statistics().peak_gathered == 0
    with engine.gathered(model.layers[0], write=True):
        pass
    assert engine.statistics().gathered == 0


@pytest.mark.exhaustive
@ranks(4)
def test_what_few_ranks_keep_for_backward_counts_as_gathered() -> None:
    model = Row()
    engine = shard(model, reshard_after_forward=2, prefetch=0)
    step(model)
    engine.reset_peak_gathered()
    loss = model(torch.ones(2, 8)).sum()
    kept = engine.statistics().gathered
    assert kept == engine.memory_summary()["gathered"] == 4 * LAYER // 2 + LAYER  # the last one is still whole
    loss.backward()
    assert engine.statistics().gathered == 0
    assert engine.statistics().peak_gathered == kept


@ranks(2)
def test_a_forward_that_fails_leaves_the_count_right() -> None:
    model = Row()
    engine = shard(model)
    step(model)

    def fail(*_: Any) -> None:
        raise ValueError("on all ranks")

    handle = model.layers[2].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on all ranks"):
        step(model)
    handle.remove()
    step(model)
    assert engine.statistics().gathered == 0 == engine.memory_summary()["gathered"]


@ranks(2)
def test_copies_of_a_model_count_their_own_gathered_bytes() -> None:
    model = Row()
    engine = shard(model, strategy="shard_optim")
    step(model)
    held = engine.statistics().gathered
    other = torch_shard.engine_of(copy.deepcopy(model))
    assert other is not None
    assert held == 5 * LAYER
    assert other.statistics().gathered == other.statistics().peak_gathered == 0
    assert other.statistics().bytes_sent == engine.bytes_sent


@pytest.mark.parametrize("p", [2.0, *exhaustive(1.0, math.inf)])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard", "shard_grad_op")])
@ranks(2, exhaustive=(1, 3))
def test_norms_of_units_are_those_of_the_plain_model(p: float, strategy: str, rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank, strategy=strategy)
    for param in (*plain.blocks[0].parameters(), *model.blocks[0].parameters()):
        param.grad = None
    wanted = reference_norms(plain, engine, p)
    assert min(wanted.values()) == wanted["blocks.0"] == 0 < max(wanted.values())
    with Collectives() as sent:
        found = engine.grad_norms(p)
    assert {name: norm.item() for name, norm in found.items()} == pytest.approx(wanted, rel=1e-5)
    assert len(sent.calls) == (strategy != "no_shard" and world_size > 1)
    assert found == {name: pytest.approx(norm.item()) for name, norm in found.items()}


def reference_norms(plain: nn.Module, engine: torch_shard.Engine, p: float, only: set[str] | None = None) -> Any:
    norms = {}
    for unit in engine.units:
        names = [name for name in unit.names if only is None or name in only]
        grads = [g for name in names if (g := plain.get_parameter(name).grad) is not None and g.numel()]
        norms[unit.name] = torch.nn.utils.get_total_norm(grads, p).item() if grads else 0.0
    return norms


@pytest.mark.exhaustive
@ranks(4, exhaustive=(2,))
def test_norms_of_units_under_hybrid_sharding(rank: int, world_size: int) -> None:
    plain, _, engine = trained(world_size, rank, strategy="hybrid_shard", shard_size=max(1, world_size // 2))
    found = {name: norm.item() for name, norm in engine.grad_norms().items()}
    assert found == pytest.approx(reference_norms(plain, engine, 2.0), rel=1e-5)


@ranks(2)
def test_norms_of_some_parameters(rank: int, world_size: int) -> None:
    plain, model, engine = trained(world_size, rank)
    only = {name for name, _ in plain.named_parameters() if name.endswith("weight")}
    found = engine.grad_norms(parameters=[p for name, p in model.named_parameters() if name in only])
    wanted = reference_norms(plain, engine, 2.0, only)
    assert {name: norm.item() for name, norm in found.items()} == pytest.approx(wanted, rel=1e-5)


@ranks(2)
def test_norms_are_refused_where_there_are_none() -> None:
    model = Row()
    engine = shard(model)
    with pytest.raises(ConfigError, match="norm_type"):
        engine.grad_norms(0)
    with engine.no_sync():
        step(model)
    with pytest.raises(ShardError, match=r"engine\.no_sync"):
        engine.grad_norms()
    step(model)
    engine.step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ShardError, match="norms of gradients"):
        engine.grad_norms()
    engine.step_in_backward(None)


class FakeEvent:
    """Passes when the test says so."""

    now = 0.0

    def __init__(self) -> None:
        self.time = -1.0
        self.passed = False

    def record(self) -> None:
        self.time, self.passed = FakeEvent.now, False

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: FakeEvent) -> float:
        return 1e3 * (later.time - self.time)


class FakeChannel:
    waited = 0.0


class FakeStreams(Streams):
    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.made: list[FakeEvent] = []
        self.captures = False

    def timing_event(self) -> FakeEvent:
        self.made.append(FakeEvent())
        return self.made[-1]

    def record(self, stream: Any = None, *, event: Any = None, sleeps: bool = False) -> Any:
        event.record()
        return event

    def is_capturing(self) -> bool:
        return self.captures


def test_waiting_of_streams_is_read_when_it_is_over() -> None:
    streams = FakeStreams()
    timer, channel, made = StreamWaits(streams), FakeChannel(), streams.made
    for seconds in (0.25, 0.5):
        begun = timer.begin()
        FakeEvent.now += seconds
        timer.end(channel, begun)
    timer.collect()
    assert channel.waited == 0.0
    made[0].passed = made[1].passed = True
    timer.collect()
    assert channel.waited == pytest.approx(0.25)
    made[2].passed = made[3].passed = True
    for _ in range(100):
        begun = timer.begin()
        timer.end(channel, begun)
        for each in made:
            each.passed = True
    timer.collect()
    assert channel.waited == pytest.approx(0.75)
    assert len(made) <= 8, "events are used again"
    streams.captures = True
    assert timer.begin() is None
    timer.end(channel, None)
