"""Several sharded models over one group: what one of them runs must not pair with what another one runs."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import Block, average_grads, batch, same, same_grads
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.comm.multi_engine_order import EngineOrder
from torch_shard.errors import DivergenceError, ShardError

WIDTH = 5


def _twins(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Sequential(Block(WIDTH), Block(WIDTH)).double()
    second = nn.Sequential(Block(WIDTH), Block(WIDTH), *([Block(WIDTH)] if kind == "larger" else [])).double()
    torch_shard.shard(first, unit_bytes=300, timeout=20.0)
    if kind == "copy":
        return first, copy.deepcopy(first)
    torch_shard.shard(second, unit_bytes=300, timeout=20.0)
    return first, second


def _plain(model: nn.Module) -> nn.Module:
    """Collective."""
    plain = nn.Sequential(Block(WIDTH), Block(WIDTH)).double()
    plain.load_state_dict(torch_shard.engine_of(model).state_dict(rank0_only=False))
    return plain


def _train_alike(model: nn.Module, plain: nn.Module, x: torch.Tensor) -> None:
    for each in (model, plain):
        each.zero_grad()
        each(x).sum().backward()
    average_grads(plain)
    same_grads(model, plain)


@pytest.mark.parametrize("how", ["one_loss", "two_losses"])
@pytest.mark.parametrize("kind", ["twin", *exhaustive("larger"), "copy"])
@ranks(2)
def test_forwards_of_two_models_in_another_order_on_one_rank_are_an_error(rank, kind, how):
    pair = _twins(kind)
    x = batch(rank, 0)
    with pytest.raises(DivergenceError, match="different models"):
        outputs = [model(x).sum() for model in (pair if rank == 0 else pair[::-1])]
        if how == "one_loss":
            sum(outputs).backward()
        else:
            for output in outputs:
                output.backward()


@pytest.mark.parametrize("kind", ["twin", "copy"])
@ranks(2)
def test_evaluations_of_two_models_in_another_order_on_one_rank_are_each_ranks_own(rank, kind):
    pair = _twins(kind)
    x = batch(0, 0)
    with torch.no_grad():
        together = [model(x).sum() for model in pair]
        apart = [model(x).sum() for model in (pair if rank == 0 else pair[::-1])]
    assert apart == (together if rank == 0 else together[::-1])


@ranks(2)
def test_one_model_on_one_rank_and_its_twin_on_the_other_is_an_error(rank):
    pair = _twins("twin")
    for step in range(2):
        for model in pair:
            model(batch(rank, step)).sum().backward()
    with pytest.raises(DivergenceError, match=r"rank 0 is in .* of model 1 .*rank 1 is in .* of model 2"):
        pair[rank](batch(rank, 2))


@ranks(2)
def test_a_copy_that_one_rank_alone_makes_disturbs_nothing(rank):
    pair = _twins("twin")
    kept = copy.deepcopy(pair[0]) if rank == 0 else None
    plain = [_plain(model) for model in pair]
    third = torch_shard.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()).rank
    for step in range(2):
        for model, other in zip(pair, plain, strict=True):
            same(model(batch(rank, step)), other(batch(rank, step)))
            _train_alike(model, other, batch(rank, step))
    assert third == rank and (kept is None) == (rank != 0)


@pytest.mark.exhaustive
@ranks(2)
def test_ranks_that_wait_in_operations_of_different_models_hear_of_each_other_at_once(rank):
    first, second = _twins("twin")
    for _ in range(3):  # that the other model has had as many is no sign that an operation of this one was issued
        torch_shard.engine_of(second).clip_grad_norm_(1.0)
    begin = time.monotonic()
    with pytest.raises(DivergenceError, match=r"run different operations"):
        if rank == 0:
            torch_shard.engine_of(first).clip_grad_norm_(1.0)
        else:
            second(batch(rank, 0))
    assert time.monotonic() - begin < 10.0  # the timeout is 20 s


# -- a model that refuses its backward ------------------------------------------------------------------------------------


def _edited_under_no_sync(rank: int) -> nn.Module:
    """A model with a gradient that was edited while its reduction is deferred, which its next backward refuses."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH)).double()
    engine = torch_shard.shard(model, timeout=20.0)
    with engine.no_sync():
        model(batch(rank, 0)).sum().backward()
    _halve_gradients(model)
    return model


def _halve_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.grad.mul_(0.5)


@ranks(2)
def test_a_gradient_that_one_model_refuses_stops_no_backward_of_another(rank):
    other, refused = _twins("twin")[0], _edited_under_no_sync(rank)
    plain = _plain(other)
    for _ in range(2):  # nor is the refusal forgotten by a backward that it does not concern
        _train_alike(other, plain, batch(rank, 1))
        with pytest.raises(ShardError, match=r"0\.\w+ was edited"):
            refused(batch(rank, 1)).sum().backward()


@ranks(2)
def test_a_backward_that_one_model_refuses_leaves_another_free_to_edit_its_gradients(rank):
    """What an engine notes of a backward that runs ends with it, though another engine has raised."""
    other, refused = _twins("twin")[0], _edited_under_no_sync(rank)
    engine = torch_shard.engine_of(other)
    with engine.no_sync():
        other(batch(rank, 1)).sum().backward()
    with pytest.raises(ShardError, match=r"0\.\w+ was edited"):
        refused(batch(rank, 1)).sum().backward()
    _halve_gradients(other)
    with pytest.raises(ShardError, match="was edited"):
        torch.autograd.grad(other(batch(rank, 2)).sum(), list(other.parameters()))


def order_of(units: dict[str, int]) -> int | None:
    """The order of the collectives in one backward through two models: one collective of each kind, of these units."""
    order, models = EngineOrder(), (object(), object())
    for task, model in enumerate(models):
        order.begin(model, task)
    for kind, unit in units.items():
        order.note(kind, 1, unit)
    for model in models:
        order.end(model)
    return order.order()


@pytest.mark.parametrize("kind", ["gather", "reduce", "secondary gather"])
def test_in_a_backward_through_several_models_another_unit_is_another_order_for_every_kind_of_collective(kind):
    usual = {"gather": 0, "reduce": 0, "secondary gather": 0}
    found = {order_of({**usual, kind: unit}) for unit in range(4)}
    assert len(found) == 4 and None not in found
