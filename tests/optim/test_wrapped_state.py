"""Optimizer state in tensors that hold other tensors, as state in 8 bits is kept: at the owner, saved, loaded, or refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward
from tests.optim.helpers import Descent
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard.errors import CheckpointError, ShardError

MANY = 20  # elements, from which a parameter's state is kept in codes


class Coded(torch.Tensor):
    """Values in 8 bits, with one scale for each row. Adds in place, nothing else."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, name: str) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, name: str) -> None:
        self.codes, self.scale, self.name_of_it = codes, scale, name

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], self.name_of_it

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], name: Any, size: Any, stride: Any) -> Coded:
        return cls(parts["codes"], parts["scale"], name)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._to_copy.default:
            return cls(args[0].codes.clone(), args[0].scale.clone(), args[0].name_of_it)
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].name_of_it)
        raise NotImplementedError(f"{function} of Coded")

    def values(self) -> torch.Tensor:
        return self.codes.to(self.scale.dtype) * self.scale

    def set(self, values: torch.Tensor) -> None:
        self.scale.copy_(values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127)
        self.codes.copy_((values / self.scale).round())


torch.serialization.add_safe_globals([Coded])


class Momentum8bit(Descent):
    """SGD whose momentum is kept in codes where a parameter has many elements."""

    def __init__(self, params: Any, note: Any = None) -> None:
        super().__init__(params)
        self.note = note

    def update(self, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state and p.numel() >= MANY and p.ndim == 2:
            scale = torch.zeros(p.shape[0], 1, dtype=p.dtype)
            state["momentum"] = Coded(torch.zeros(p.shape, dtype=torch.int8), scale, "momentum")
        elif not state:
            state["momentum"] = torch.zeros_like(p)
        if self.note is not None:
            state["note"] = self.note
        momentum = state["momentum"]
        values = (momentum.values() if isinstance(momentum, Coded) else momentum) * 0.9 + p.grad
        momentum.set(values) if isinstance(momentum, Coded) else momentum.copy_(values)
        p.sub_(values, alpha=group["lr"])


torch_shard.optim.register(Momentum8bit, kind="matrix")


def pair_of(rank: int, world_size: int, **options: Any) -> Pair:
    return Pair(MLP, rank, world_size, optimizer=lambda model: Momentum8bit(model.parameters(), **options))


def advance(pair: Pair, steps: range) -> None:
    for step in steps:
        pair.step(plain_backward, batch(pair.rank, step))
    pair.check()


def coded_in(state: Any) -> list[str]:
    return [name for name, own in state.items() if isinstance(own["momentum"], Coded)]


def same_state(pair: Pair, state: Any) -> None:
    wanted = {name: pair.plain_optimizer.state[p] for name, p in pair.plain.named_parameters()}
    assert state.keys() == wanted.keys() and coded_in(state) == coded_in(wanted) != []
    for name, own in wanted.items():
        found, momentum = state[name]["momentum"], own["momentum"]
        if isinstance(momentum, Coded):
            assert found.name_of_it == "momentum" and torch.equal(found.codes, momentum.codes)
            found, momentum = found.scale, momentum.scale
        torch.testing.assert_close(found, momentum)


@ranks(2, exhaustive=(3,))
def test_the_codes_are_those_of_a_plain_training(rank, world_size):
    pair = pair_of(rank, world_size)
    advance(pair, range(3))
    found = pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)
    same_state(pair, found["state"])
    kept = copy.copy(found["state"][coded_in(found["state"])[0]]["momentum"].codes)
    advance(pair, range(3, 4))
    assert torch.equal(found["state"][coded_in(found["state"])[0]]["momentum"].codes, kept)  # a snapshot


def _saves(rank: int, world_size: int, folder: str) -> None:
    pair = pair_of(rank, world_size)
    advance(pair, range(3))
    pair.engine.save(f"{folder}/sharded", pair.optimizer)
    state = pair.engine.optim_state_dict(pair.optimizer), pair.engine.state_dict()
    if rank == 0:
        torch.save(state, f"{folder}/whole.pt")
        torch.save((pair.plain.state_dict(), pair.plain_optimizer.state_dict()), f"{folder}/plain.pt")


def _resumes(rank: int, world_size: int, folder: str, way: str) -> None:
    pair = pair_of(rank, world_size)
    if way == "sharded":
        pair.engine.load(f"{folder}/sharded", pair.optimizer)
    else:
        optimizer, model = torch.load(f"{folder}/whole.pt", weights_only=True)
        pair.engine.load_state_dict(model)
        pair.engine.load_optim_state_dict(pair.optimizer, optimizer)
    model, optimizer = torch.load(f"{folder}/plain.pt", weights_only=True)
    pair.plain.load_state_dict(model)
    pair.plain_optimizer.load_state_dict(optimizer)
    same_state(pair, pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)["state"])
    advance(pair, range(3, 5))


@pytest.mark.parametrize("way", ["sharded", *exhaustive("whole")])
def test_training_resumes_on_another_number_of_ranks(way, tmp_path):
    run(2, _saves, str(tmp_path))
    run(3, _resumes, str(tmp_path), way)


@ranks(2)
def test_the_closed_engine_leaves_it_to_the_plain_model(rank, world_size):
    pair = pair_of(rank, world_size)
    advance(pair, range(2))
    pair.engine.close(pair.optimizer)
    same_state(pair, {name: pair.optimizer.state[p] for name, p in pair.model.named_parameters()})
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        plain_backward(model, batch(rank, 2))
        average_grads(model)
        optimizer.step()
    pair.check()


@ranks(2)
def test_one_file_of_such_state_is_refused_on_all_ranks(rank, world_size, tmp_path):
    pair = pair_of(rank, world_size)
    advance(pair, range(1))
    with pytest.raises(CheckpointError, match=r"optimizer can't be saved"):
        pair.engine.save_full(tmp_path / "one.pt", pair.optimizer)
    advance(pair, range(1, 2))


@ranks(2)
def test_state_that_can_not_be_sent_is_an_error_on_all_ranks(rank, world_size):
    pair = pair_of(rank, world_size, note=threading.Lock())
    advance(pair, range(1))
    with pytest.raises(ShardError, match=r"engine\.optim_state_dict.*state has values that can't be sent"):
        pair.engine.optim_state_dict(pair.optimizer)
    for own in pair.optimizer.state.values():
        own["note"] = 1
    assert bool(pair.engine.optim_state_dict(pair.optimizer)) == (rank == 0)
