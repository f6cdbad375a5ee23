"""What an error says where memory has run out in a step, and that training can go on after it."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.comm.streams import Streams
from torch_shard.errors import MissingRankError
from torch_shard.optim.failed_steps import explained

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.00 MiB. GPU 0 has a total capacity of 23.69 GiB of which 0.50 MiB is free."
)


class Hungry(nn.Module):
    """A layer that runs out of memory once, in the phase that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.fails_in = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        phase, self.fails_in = self.fails_in, ""
        if phase == "forward":
            raise torch.OutOfMemoryError(MESSAGE)
        if phase == "forward on the CPU":
            torch.empty(1 << 50)
        y: torch.Tensor = self.layer(x).relu()
        if phase == "backward":
            y.register_hook(fail)
        return y


def fail(grad: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def train(model: Any, optimizer: torch.optim.Optimizer, fails_in: str) -> list[torch.Tensor]:
    losses = []
    for step in range(4):
        if step == 2:
            model[3].fails_in = fails_in
        x = torch.arange(8 * 256, dtype=torch.float32).reshape(8, 256).sin()
        if step == 2 and fails_in:
            with pytest.raises(RuntimeError) as caught:
                model(x).square().mean().backward()
            errors.append(caught.value)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


errors: list[RuntimeError] = []


@pytest.mark.parametrize("fails_in", ["forward", "forward on the CPU", "backward"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@ranks(2)
def test_the_error_says_what_holds_the_memory_and_training_goes_on(rank: int, strategy: str, fails_in: str) -> None:
    errors.clear()
    plain = nn.Sequential(*[Hungry() for _ in range(6)])
    model = copy.deepcopy(plain)
    expected = train(plain, torch.optim.Adam(plain.parameters()), "")
    engine = torch_shard.shard(model, strategy=strategy, units=[Hungry])
    found = train(model, torch.optim.Adam(model.parameters()), fails_in)
    torch.testing.assert_close(found, expected)
    (error,) = errors
    assert isinstance(error, torch.OutOfMemoryError) == (fails_in != "forward on the CPU")
    text = str(error)
    phase = fails_in.split()[0]
    assert f"\nrank {rank}: memory has run out in the {phase}" in text
    assert phase == "backward" or f"in the {phase} of 3." in text
    size = 256 * 256 * 4 + 256 * 4
    held = {kind: float(now.replace(",", "")) for kind, now in re.findall(r"  ([a-z ]+): ([\d.,]+) MiB \(", text)}
    assert held["parameters"] == pytest.approx(6 * size / 2 / 2**20, abs=0.02)
    assert held["optimizer state"] == pytest.approx(2 * held["parameters"], abs=0.02)
    assert ("gradients of this backward are dropped" in text) == (phase == "backward")
    if fails_in != "forward on the CPU":  # which asks for more than any strategy saves
        wanted = {"full_shard": "full_shard with offload (", "shard_grad_op": "full_shard ("}[strategy]
        assert f"free at least what was asked for: {wanted}" in text
    assert "torch-shard plan" in text
    engine.close()


@ranks(2, fresh=True)
def test_ranks_that_wait_in_vain_quote_the_one_that_ran_out_of_memory(rank: int) -> None:
    model = nn.Sequential(*[Hungry() for _ in range(3)])
    torch_shard.shard(model, units=[Hungry], timeout=3.0, alone="error")
    x = torch.ones(2, 256)
    model(x).sum().backward()
    if rank == 1:
        model[1].fails_in = "forward"
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    else:
        with pytest.raises(
            MissingRankError, match=r"rank 1 ran out of memory in the forward of 1 at \S*test_out_of_memory"
        ):
            model(x).sum().backward()
    dist.barrier()


@pytest.mark.exhaustive
@ranks(2, may_die=(1,))
def test_the_others_quote_a_rank_that_has_died_for_want_of_memory(rank: int) -> None:
    model = nn.Sequential(*[Hungry() for _ in range(3)])
    torch_shard.shard(model, units=[Hungry])
    model[1].fails_in = "forward" if rank == 1 else ""
    try:
        with pytest.raises(
            MissingRankError, match=r"probably died; see its log. Rank 1 ran out of memory in the forward of 1"
        ):
            model(torch.ones(2, 256)).sum().backward()
    except torch.OutOfMemoryError:
        os._exit(1)


def test_on_a_device_the_rest_has_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Hungry())
    torch_shard.shard(model, strategy="no_shard")
    monkeypatch.setattr(Streams, "allocated_memory", lambda self: 10 << 20)
    model[0].fails_in = "forward"
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(torch.ones(2, 256))
    size = (256 * 256 + 256) * 4 / 2**20
    (rest,) = re.findall(r"The rest, ([\d.]+) MiB, is activations", str(caught.value))
    assert float(rest) == pytest.approx(10 - size, abs=0.02)


def test_other_errors_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    torch_shard.shard(model)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 5))
    assert "memory has run out" not in str(caught.value)


@ranks(2, fresh=True)
def test_an_optimizer_that_can_not_make_its_state_says_so_and_the_others_quote_it(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[Hungry() for _ in range(3)])
    torch_shard.shard(model, units=[Hungry], timeout=3.0, alone="error")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    if rank == 1:
        monkeypatch.setattr(torch.optim.Adam, "_init_group", lambda *args: fail(torch.empty(0)))
        with pytest.raises(torch.OutOfMemoryError) as caught:
            optimizer.step()
        text = str(caught.value)
        assert "\nrank 1: memory has run out in the optimizer's step. This rank holds" in text
        assert "\nSome parameters and their state may have stepped, others not" in text
    else:
        optimizer.step()
        with pytest.raises(MissingRankError, match="rank 1 ran out of memory in the optimizer's step at"):
            model(torch.ones(2, 256))
    dist.barrier()


def test_an_error_of_a_closure_is_none_of_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    torch_shard.shard(model)
    optimizer = torch.optim.SGD(model.parameters())

    def closure() -> float:
        model(torch.ones(2, 4)).sum().backward()
        raise torch.OutOfMemoryError(MESSAGE)

    with pytest.raises(torch.OutOfMemoryError) as caught, explained(optimizer):
        optimizer.step(closure)
    assert str(caught.value) == MESSAGE


def test_what_the_plan_has_found_is_named_first() -> None:
    model = nn.Sequential(Hungry())
    torch_shard.shard(model).smaller_settings = ("full_shard, prefetch 0 (1.00 MiB)",)
    model[0].fails_in = "forward"
    with pytest.raises(
        torch.OutOfMemoryError, match=r"has tried, these take less memory: full_shard, prefetch 0 \(1.00 MiB\)\."
    ):
        model(torch.ones(2, 256))
