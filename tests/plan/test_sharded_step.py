"""The replayed step of a sharded model beside a real one: the same gathers and reductions, and the same peak of memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.plan.test_trace_step import Gpt
from tests.support.followed import followed
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import Offload, Precision, Quantized, ShardConfig
from torch_shard.activation_checkpointing import checkpointed_layers
from torch_shard.errors import ConfigError
from torch_shard.plan import replayed_reductions
from torch_shard.plan import sharded_step as sharded_step_module
from torch_shard.plan.layer_selection import repeated_layers
from torch_shard.plan.planner import make_plan
from torch_shard.plan.sharded_step import sharded_step
from torch_shard.plan.step_trace import (
    KINDS,
    Allocation,
    CollectiveStart,
    CollectiveWait,
    Free,
    PhaseStart,
    StepTrace,
)
from torch_shard.plan.trace_for import trace_for
from torch_shard.plan.unit_stand_in import Log
from torch_shard.runtime import reduce_schedule, statistics
from torch_shard.selftest.allocated import held_by_tensors, peak_of, tensors_here

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optim", "no_shard"]
AUTOCAST = Precision(torch.bfloat16, cast_inputs=False, cast_params="autocast")


class Branches(nn.Module):
    """Two towers over one input, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])
        self.right = nn.ModuleList([nn.Linear(256, 256) for _ in range(3)])
        self.unused = nn.ModuleList([nn.Linear(256, 256) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = right = x
        for layer in self.left:
            left = layer(left).relu()
        for layer in self.right:
            right = layer(right).tanh()
        return self.left[0](left) * right


def gpt(**settings: Any) -> Callable[[], nn.Module]:
    return lambda: Gpt(layers=4, width=128, **settings)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": gpt(),
    "tied": gpt(tied=True),
    "checkpointing": gpt(reentrant=False),
    "reentrant checkpointing": gpt(reentrant=True),
    "recomputed by the engine": gpt(),
    "branches": Branches,
}


class Training:
    """A model, its optimizer, and its steps on one batch."""

    def __init__(self, model: str, *, autocast: bool = False, micro_batches: int = 1, zero_grad: str = "first") -> None:
        torch.manual_seed(0)
        self.model = MODELS[model]()
        self.x = torch.randn(8, 256) if model == "branches" else torch.randint(0, 100, (4, 32))
        self.autocast, self.micro_batches, self.zero_grad = autocast, micro_batches, zero_grad
        self.recomputes = model == "recomputed by the engine"
        self.optimizer: Any = None

    def prepare(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, model: nn.Module) -> None:
        if self.zero_grad == "first":
            self.optimizer.zero_grad()
        for number in range(self.micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = model(self.x).float().square().mean()
            if self.zero_grad == "before backward" and number == 0:
                self.optimizer.zero_grad()
            loss.backward()
            del loss
        self.optimizer.step()
        if self.zero_grad == "last":
            self.optimizer.zero_grad()


def predicted(training: Training, config: ShardConfig, world: int, rank: int = 0) -> StepTrace:
    """Return the replayed step of a new training."""
    training.prepare()
    plan = make_plan(training.model, config, config.shard_size or world)
    layers = repeated_layers("", training.model, None) if training.recomputes else ()
    trace = trace_for(training.model, training.step, plan, config, optimizers=[training.optimizer], checkpointed=layers)
    return sharded_step(trace, plan, config, rank=rank, data_parallel=world)


def train(training: Training, config: ShardConfig, steps: int) -> None:
    with checkpointed_layers(training.model, training.recomputes, units=None):
        torch_shard.shard(training.model, config)
    training.prepare()
    for _ in range(steps):
        training.step(training.model)


def of_replay(step: StepTrace) -> list[tuple[str, str]]:
    """Return what ``followed`` yields, of a replayed step."""
    gathered: dict[int, str] = {}
    found: list[tuple[str, str]] = []
    for event in step.events:
        if isinstance(event, Allocation) and event.kind == "gathered":
            gathered[event.storage] = event.name
        elif isinstance(event, CollectiveStart):
            found.append(("gather" if event.kind == "all_gather" else "reduce", event.unit))
        elif isinstance(event, Free) and event.storage in gathered:
            found.append(("free", gathered[event.storage]))
    # A unit with several flat buffers has one gather, but frees, reduces and allocates each.
    return [each for i, each in enumerate(found) if i == 0 or found[i - 1] != each]


@pytest.mark.parametrize("prefetch", [1, *exhaustive(0, 2)])
@pytest.mark.parametrize("strategy", quick(STRATEGIES[:3], ["full_shard"]))
@pytest.mark.parametrize("model", MODELS)
@ranks(2)
def test_units_are_gathered_freed_and_reduced_in_the_order_of_the_engine(
    rank: int, monkeypatch: pytest.MonkeyPatch, model: str, strategy: Any, prefetch: int
) -> None:
    config = ShardConfig(strategy=strategy, prefetch=prefetch, unit_bytes=1 << 16)
    replayed = of_replay(predicted(Training(model), config, 2))
    training = Training(model)
    train(training, config, 3)
    with followed(monkeypatch) as found:
        training.step(training.model)
    assert found == replayed
    assert {kind for kind, _ in found} == {"gather", "free", "reduce"}


@pytest.mark.parametrize("zero_grad", ["first", *exhaustive("before backward", "last")])
@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard", "no_shard"]))
@ranks(2, exhaustive=(3,))
def test_the_peak_is_that_of_the_allocator(rank: int, strategy: Any, zero_grad: str) -> None:
    compare(ShardConfig(strategy=strategy), "gpt", zero_grad=zero_grad)


@pytest.mark.parametrize(
    "settings", [{"micro_batches": 3}, {"autocast": True}, {}], ids=["accumulation", "autocast", "bf16"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.exhaustive
@ranks(3)
def test_the_peak_is_that_of_the_allocator_for_other_models(
    rank: int, model: str, strategy: Any, settings: dict[str, Any]
) -> None:
    precision = AUTOCAST if settings.get("autocast") else None if settings else Precision(torch.bfloat16)
    config = ShardConfig(strategy=strategy, precision=precision)
    compare(config, model, **settings)


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batches": 2}, {"autocast": True}], ids=["", "accumulation", "autocast"]
)
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@pytest.mark.exhaustive
@ranks(4)
def test_the_peak_with_replicas_is_that_of_the_allocator(rank: int, strategy: Any, settings: dict[str, Any]) -> None:
    precision = AUTOCAST if settings.get("autocast") else None
    compare(ShardConfig(strategy=strategy, shard_size=2, precision=precision), "gpt", **settings)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.exhaustive
@ranks(2)
def test_the_peak_with_other_prefetch_is_that_of_the_allocator(rank: int, prefetch: int) -> None:
    compare(ShardConfig(prefetch=prefetch), "gpt")


class Apart(Log):
    """The events of a replay in which the host is another device than the CPU, and optimizer state is on the host."""

    def allocate(self, *args: Any, on_host: bool = False, **kwargs: Any) -> int:
        storage = super().allocate(*args, on_host=on_host, **kwargs)
        if on_host and not self.quiet:
            self.events[-1] = replace(self.events[-1], device="host")  # type: ignore[call-arg]
        return storage

    def add(self, event: Any) -> None:
        is_state = isinstance(event, Allocation) and event.kind == "optimizer state"
        super().add(replace(event, device="host") if is_state else event)


@pytest.mark.parametrize(
    ("strategy", "offload", "precision", "settings"),
    [
        ("full_shard", Offload(), None, {}),
        *exhaustive(
            ("full_shard", Offload(params=False), None, {}),
            ("shard_grad_op", Offload(), None, {}),
            ("shard_grad_op", Offload(params=False), None, {}),
            ("full_shard", Offload(), AUTOCAST, {"autocast": True}),
            ("full_shard", Offload(params=False), AUTOCAST, {"autocast": True}),
            ("full_shard", Offload(), Precision(torch.bfloat16), {}),
            ("full_shard", Offload(params=False), Precision(torch.bfloat16), {}),
            ("full_shard", Offload(), None, {"micro_batches": 2}),
            ("full_shard", Offload(params=False), None, {"micro_batches": 2}),
        ),
    ],
    ids=str,
)
@ranks(2, exhaustive=(1, 3))
def test_the_peaks_with_offload_are_those_of_the_device_and_of_the_host(
    rank: int, strategy: Any, offload: Offload, precision: Any, settings: dict[str, Any]
) -> None:
    config = ShardConfig(strategy=strategy, offload=offload, precision=precision)
    with patch.object(sharded_step_module, "Log", Apart):
        step = predicted(Training("gpt", **settings), config, dist.get_world_size(), rank)
        # What an optimizer's step needs for a moment is allocated on the host's thread, which the profiler doesn't see.
        host = step.peak("host", kinds=[kind for kind in KINDS if kind != "temporary"]).total
        compare(config, "gpt", host=host, **settings)


def compare(config: ShardConfig, model: str, host: int = 0, **settings: Any) -> None:
    """Compare the predicted peak of the device with a step; `host`: the prediction for the host, which is compared as well."""
    world, rank = dist.get_world_size(), dist.get_rank()
    most = predicted(Training(model, **settings), config, world, rank).peak().total
    with (
        patch.object(replayed_reductions, "has_too_many", lambda in_flight, on_streams: in_flight > 0),
        patch.object(replayed_reductions, "IN_FLIGHT", 0),
    ):
        least = predicted(Training(model, **settings), config, world, rank).peak().total
    others = [weakref.ref(tensor) for tensor in tensors_here()]  # of other tests in this process; they may be freed yet
    sharded = Training(model, **settings)
    train(sharded, config, 3)
    runtime = runtime_of(torch_shard.engine_of(sharded.model))
    on_host = host_bytes(runtime) if runtime.host is not None else 0
    assert on_host == pytest.approx(host, rel=0.01)
    if on_host and settings.get("micro_batches", 1) > 1:
        return  # on CPUs all reduced gradients may wait for the thread of the host that adds them, without a copy
    peaks = []
    for _ in range(10):
        gc.collect()
        already = held_by_tensors(tensor for ref in others if (tensor := ref()) is not None)
        with patch.object(
            reduce_schedule, "PAUSE", 30.0
        ):  # a rank that goes on without a late one holds one more reduction
            peak, unseen = peak_of(lambda: sharded.step(sharded.model), torch.device("cpu"))
        peaks.append(peak - already - on_host)
        unseen_by_any = torch.tensor(unseen)
        dist.all_reduce(unseen_by_any, dist.ReduceOp.MAX)
        if unseen_by_any < 1 << 16:
            break
    # Which reductions have ended when the next begins is chance, with several ranks: at best all; the replay assumes none.
    # In a try with memory that was freed unseen both the peak and what was there before may be wrong, either way.
    peak = peaks[-1] if unseen_by_any < 1 << 16 else sorted(peaks)[len(peaks) // 2]
    assert 0.98 * least <= peak <= 1.02 * most
    assert least == most or world > 1 or on_host


def host_bytes(runtime: Any) -> int:
    """Return the bytes of host memory that are held from step to step."""
    held = [staged.memory for staged in runtime.host.staging._buffers]
    for flat in runtime.flats:
        flat.wait_for_host()
        held += [flat.memory, *(buffer for buffer, _ in flat.gradients.host._buffers)]
        held += [] if flat.host._cast is None else [flat.host._cast]
    return held_by_tensors(held) + statistics.optimizer_bytes(runtime)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_leaves_what_it_found(strategy: Any) -> None:
    step = predicted(Training("gpt", zero_grad="last"), ShardConfig(strategy=strategy), 4)
    levels = dict(step.memory())
    begin = next(i for i, event in enumerate(step.events) if isinstance(event, PhaseStart))
    first = levels[max(index for index in levels if index < begin)]
    assert step.memory()[-1][1] == first
    assert first["gradient"] == first["reduction"] == 0


def test_shards_are_those_of_the_rank() -> None:
    training = Training("gpt")
    whole = sum(p.numel() for p in training.model.parameters())
    totals = {"parameter": 0, "optimizer state": 0}
    for rank in range(4):
        step = predicted(Training("gpt"), ShardConfig(), 4, rank)
        for kind in totals:
            totals[kind] += sum(e.nbytes for e in step.events if isinstance(e, Allocation) and e.kind == kind)  # type: ignore[comparison-overlap]
    assert totals["parameter"] == pytest.approx(4 * whole, rel=1e-3)
    assert totals["optimizer state"] == pytest.approx(8 * whole, rel=1e-3)


def test_every_collective_that_begins_is_waited_for() -> None:
    step = predicted(Training("gpt"), ShardConfig(), 4)
    begun = [event.number for event in step.events if isinstance(event, CollectiveStart)]
    waited = [event.number for event in step.events if isinstance(event, CollectiveWait)]
    assert len(set(begun)) == len(begun) > 10
    assert sorted(waited) == sorted(begun)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("offload", Offload(nvme="/tmp")), ("quantized", Quantized("int8")), ("reshard_after_forward", 2)],
)
def test_what_is_not_modelled_is_refused(setting: str, value: Any) -> None:
    config = ShardConfig(**{setting: value})
    plan = make_plan(nn.Linear(4, 4), config, 4)
    with pytest.raises(ConfigError, match=f"^{setting}(\\.nvme)?: "):
        sharded_step(StepTrace("cpu", ()), plan, config)
