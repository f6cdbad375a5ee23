"""Activation offload while a step is traced moves what it moves in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from torch_shard import ShardConfig
from torch_shard.activation_checkpointing import checkpointed_layers, offload_of
from torch_shard.activation_offload import MIN_BYTES
from torch_shard.plan.planner import make_plan
from torch_shard.plan.step_trace import KINDS, CollectiveStart, CollectiveWait, StepTrace
from torch_shard.plan.trace_for import computing_as, trace_for
from torch_shard.plan.trace_step import tracing

WIDTH = 64
ROWS = MIN_BYTES // 4 // WIDTH  # just enough to be moved


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, other: torch.Tensor | None = None, *, more: Any = None) -> torch.Tensor:
        hidden = self.linear(hidden).tanh()
        return hidden if other is None else hidden + other


class Net(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.call = nn.Linear(WIDTH, WIDTH), call
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.call(self.layers, x)


def in_a_row(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def by_name(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(hidden=x)
    return x


def of_one_tensor(layers: Any, x: torch.Tensor) -> torch.Tensor:
    memory = x * 2
    for layer in layers:
        x = layer(x, memory)
    return x


def in_a_tuple(layers: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x, more=(x * 2,))
    return x


def expanded(layers: Any, x: torch.Tensor) -> torch.Tensor:
    row = x[:1].expand(len(x), WIDTH)
    for layer in layers:
        x = layer(x, row)
    return x


def with_a_small_one_between(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers[1](layers[0](x))
    small = layers[2](x[:2])
    return layers[3](x) + small.sum()


def under_other_hooks(layers: Any, x: torch.Tensor) -> torch.Tensor:
    x = layers[1](layers[0](x))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        x = layers[2](x)
    return layers[3](x)


CALLS = [in_a_row, by_name, of_one_tensor, in_a_tuple, expanded, with_a_small_one_between, under_other_hooks]


def step(model: nn.Module, device: str = "cuda") -> None:
    model(torch.ones(ROWS, WIDTH, device=device)).square().mean().backward()


def moved(trace: StepTrace) -> tuple[int, int]:
    """Return the bytes that are copied to the host, and back."""
    copies = [event for event in trace.events if isinstance(event, CollectiveStart)]
    assert sorted(e.number for e in trace.events if isinstance(e, CollectiveWait)) == [e.number for e in copies]
    out, back = (sum(e.nbytes for e in copies if e.kind == kind) for kind in ("to_host", "to_device"))
    return out, back


@pytest.mark.parametrize("call", CALLS)
def test_the_same_bytes_are_copied_as_in_training(call: Callable[..., torch.Tensor]) -> None:
    model = Net(call)
    plan = make_plan(model, ShardConfig(), 2)
    trace = trace_for(model, step, plan, ShardConfig(), device="cuda", checkpointed=model.layers, offloaded=True)
    with checkpointed_layers(model, (Layer,), None, offloaded=True):
        step(model, "cpu")
    offload = offload_of(model)
    assert offload is not None
    assert moved(trace) == (offload.copied_out, offload.copied_back)
    assert offload.copied_out >= 2 * MIN_BYTES
    assert trace.memory("cpu")[-1][1] == dict.fromkeys(KINDS, 0)
    kept = trace_for(model, step, plan, ShardConfig(), device="cuda", checkpointed=model.layers)
    # The input of the last layer stays, and on the way back another one is there.
    least = MIN_BYTES if call is in_a_row else 0
    assert trace.peak(kinds=("activation",)).total <= kept.peak(kinds=("activation",)).total - least


def test_copies_back_are_started_one_layer_ahead() -> None:
    model = Net(in_a_row)
    plan = make_plan(model, ShardConfig(), 2)
    trace = trace_for(model, step, plan, ShardConfig(), device="cuda", checkpointed=model.layers, offloaded=True)
    kinds = [
        event.kind if isinstance(event, CollectiveStart) else "wait"
        for event in trace.events
        if isinstance(event, (CollectiveStart, CollectiveWait))
    ]
    # The input of the last layer is still on the device, where backward waits for the copy that was made of it.
    forward = ["to_host", *["wait", "to_host"] * 3]
    assert kinds == [*forward, "to_device", "wait", *["to_device", "wait"] * 2, "wait"]


def test_in_a_script_too_the_copies_are_on_the_host() -> None:
    model = Net(in_a_row)
    plan, config = make_plan(model, ShardConfig(), 2), ShardConfig()
    with (
        computing_as(model, plan, config, model.layers, offloaded=True),
        tracing(model, device="cuda", optimizers=(), all_on_device=True) as recorder,
    ):
        model(torch.ones(ROWS, WIDTH)).square().mean().backward()
        trace = recorder.finish()
    assert moved(trace) == (4 * MIN_BYTES, 3 * MIN_BYTES)
    assert trace.peak("cpu").total == 4 * MIN_BYTES
