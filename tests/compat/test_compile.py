"""torch.compile: of blocks, of the whole model, in place; the same graphs at every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, average_grads, batch, loss_of
from tests.compat.modes import as_computed
from tests.precision.harness import low_copy, mean_over_ranks
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks


def blocks(model: Any, **options: Any) -> Callable[..., Any]:
    for block in model.blocks:
        block.compile(**options)
    return model


def whole(model: nn.Module, **options: Any) -> Callable[..., Any]:
    return torch.compile(model, **options)


def in_place(model: nn.Module, **options: Any) -> Callable[..., Any]:
    model.compile(**options)
    return model


def wrapped_blocks(model: Any, **options: Any) -> Callable[..., Any]:
    """Before sharding; :func:`torch.compile` puts a module of its own around each block."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **options)
    return model


WAYS = [blocks, whole, in_place]


def train(
    function: Any, model: nn.Module, plain: nn.Module, rank: int, low: torch.dtype | None, tolerance: Any
) -> None:
    dynamo: Any = torch._dynamo
    dtype = next(plain.parameters()).dtype
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(5):
        x = batch(rank, step).to(dtype)
        with dynamo.config.patch(error_on_recompile=step > 1):
            loss_of(function(x)).backward()
        if low is None:
            loss_of(plain(x)).backward()
            average_grads(plain)
        else:
            lower = low_copy(plain, low)
            loss_of(lower(x.to(low))).backward()
            for p, q in zip(plain.parameters(), lower.parameters(), strict=True):
                p.grad = mean_over_ranks(q.grad, p.dtype, low)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, **tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2, exhaustive=(3,), timeout=120)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("way", quick([*WAYS, wrapped_blocks], [whole]))
def test_it_trains_like_plain_without_recompiling_after_the_second_step(way, strategy, rank):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP().double()
    plain = as_computed(copy.deepcopy(model))
    if way is wrapped_blocks:
        way(model, backend="aot_eager")
    torch_shard.shard(model, strategy=strategy, unit_bytes=500, timeout=60.0)
    function = model if way is wrapped_blocks else way(model, backend="aot_eager")
    train(function, model, plain, rank, None, {"rtol": 1e-9, "atol": 1e-10})


CASES = {
    "inductor": ({"backend": "inductor"}, {"unit_bytes": 300}, None, {"rtol": 1e-4, "atol": 1e-5}),
    # Compiled graphs may keep what eager rounds to bf16 in between.
    "bfloat16": (
        {"backend": "aot_eager"},
        {"unit_bytes": 500, "precision": torch.bfloat16},
        torch.bfloat16,
        {"rtol": 0.05, "atol": 0.02},
    ),
}


@pytest.mark.exhaustive
@ranks(2, timeout=400)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_inductor_and_mixed_precision_train_like_plain(case, way, rank):
    options, settings, low, tolerance = CASES[case]
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP()
    plain = as_computed(copy.deepcopy(model))
    torch_shard.shard(model, timeout=200.0, **settings)
    train(way(model, **options), model, plain, rank, low, tolerance)


@pytest.mark.exhaustive(usual=True)
@ranks(2, timeout=120)
def test_the_whole_model_runs_a_graph_for_each_unit_and_equal_units_share_it(rank):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP()
    engine = torch_shard.shard(model, units=["inp", r"re:blocks\.\d+", "head"], timeout=60.0)
    graphs: list[Any] = []
    calls: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        if any(node.op == "call_function" for node in graph.graph.nodes):
            graphs.append(graph)
            return lambda *args: (calls.append(graph), graph(*args))[1]
        return graph.forward

    function = torch.compile(model, backend=backend)
    for step in range(3):
        calls.clear()
        loss_of(function(batch(rank, step).float())).backward()
        assert len(calls) == len(engine.units) == 5
    assert len(graphs) == 3  # the first layer, a block, the head


@ranks(2, timeout=120)
def test_one_graph_for_all_is_refused_with_the_reason(rank):
    torch._dynamo.reset()
    model = MLP()
    torch_shard.shard(model, timeout=60.0)
    with pytest.raises(
        Exception, match=r"torch_shard gathers and releases parameters here.*Leave out fullgraph=True"
    ) as info:
        torch.compile(model, backend="aot_eager", fullgraph=True)(batch(rank, 0).float())
    assert type(info.value).__name__ == "Unsupported"
    loss_of(model(batch(rank, 0).float())).backward()
