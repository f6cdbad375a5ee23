"""What an error says where memory has run out in a step, and that training can go on after it."""

from __future__ import annotations

import copy
import functools
import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.comm.collectives import Collectives
from torch_shard.comm.streams import Streams
from torch_shard.errors import MissingRankError
from torch_shard.optim.failed_steps import explained
from torch_shard.unit.unit import Unit
from torch_shard.utils.autograd_private import graph_task

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
        y: torch.Tensor = self.layer(x)
        if phase == "backward":
            y.register_hook(fail)
        return y.relu()


def fail(grad: torch.Tensor) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def train(
    model: Any, optimizer: torch.optim.Optimizer, trouble: Callable[[], None] | None = None
) -> list[torch.Tensor]:
    """Return the losses of four steps; before the third, one fails after a call of `trouble`."""
    losses = []
    for step in range(4):
        x = torch.arange(8 * 256, dtype=torch.float32).reshape(8, 256).sin()
        if step == 2 and trouble is not None:
            trouble()
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
UNIT = (256 * 256 + 256) * 4 / 2**20  # MiB


def held_and_planned(text: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return the MiB by kind that the text of an error has."""
    lines = re.findall(r"  ([a-z ]+): ([\d.,]+) MiB \(([\d.,]+)\)", text)
    held = {kind: float(nbytes.replace(",", "")) for kind, nbytes, _ in lines}
    return held, {kind: float(nbytes.replace(",", "")) for kind, _, nbytes in lines}


@pytest.mark.parametrize("fails_in", ["forward", "forward on the CPU", "backward"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@ranks(2)
def test_the_error_says_what_holds_the_memory_and_training_goes_on(rank: int, strategy: str, fails_in: str) -> None:
    errors.clear()
    plain = nn.Sequential(*[Hungry() for _ in range(6)])
    model = copy.deepcopy(plain)
    expected = train(plain, torch.optim.Adam(plain.parameters()))
    engine = torch_shard.shard(model, strategy=strategy, units=[Hungry])
    trouble = functools.partial(setattr, model[3], "fails_in", fails_in)
    found = train(model, torch.optim.Adam(model.parameters()), trouble)
    torch.testing.assert_close(found, expected)
    (error,) = errors
    assert isinstance(error, torch.OutOfMemoryError) == (fails_in != "forward on the CPU")
    text = str(error)
    phase = fails_in.split()[0]
    assert f"\nrank {rank}: memory has run out in the {phase}" in text
    assert f"in the {phase} of 3." in text
    held, planned = held_and_planned(text)
    shard = 6 * UNIT / 2
    # After unit 3 the next in forward is gathered already, and in backward the one before; units 4 and 5 have gradients.
    units = {"full_shard": 2, "shard_grad_op": 5 if phase == "forward" else 6}[strategy]
    assert held["parameters"] == pytest.approx(shard, abs=0.01)
    assert held["gathered units"] == pytest.approx(units * UNIT, abs=0.01)
    assert held["optimizer state"] == pytest.approx(2 * shard, abs=0.01)
    predicted = engine.plan.predicted
    assert planned["parameters"] == pytest.approx(predicted.parameters / 2**20, abs=0.01)
    assert planned["gathered units"] == pytest.approx(predicted.gathered_peak / 2**20, abs=0.01)
    assert planned["gradients"] == pytest.approx(predicted.gradients / 2**20, abs=0.01)
    assert planned["optimizer state"] == pytest.approx(predicted.optimizer / 2**20, abs=0.01)
    assert ("gradients of this backward are dropped" in text) == (phase == "backward")
    if fails_in != "forward on the CPU":  # which asks for more than any strategy saves
        wanted = {"full_shard": "full_shard with offload (", "shard_grad_op": "full_shard ("}[strategy]
        assert f"free at least what was asked for: {wanted}" in text
    assert "torch-shard plan" in text
    engine.close()


@pytest.mark.parametrize(
    ("strategy", "kind", "where"),
    [
        ("full_shard", "gather in forward", "forward of 3"),
        ("full_shard", "gather in backward", "backward of 3"),
        ("full_shard", "buffer of gradients", "backward of 5"),
        *exhaustive(
            ("shard_grad_op", "gather in forward", "forward of 3"),
            ("shard_grad_op", "buffer of gradients", "backward of 5"),
        ),
    ],
)
@ranks(2)
def test_training_goes_on_after_an_allocation_of_the_engine_has_failed(
    rank: int, monkeypatch: pytest.MonkeyPatch, strategy: str, kind: str, where: str
) -> None:
    errors.clear()
    plain = nn.Sequential(*[Hungry() for _ in range(6)])
    model = copy.deepcopy(plain)
    expected = train(plain, torch.optim.Adam(plain.parameters()))
    engine = torch_shard.shard(model, strategy=strategy, units=[Hungry], prefetch=0)
    of, name = (Collectives, "take") if kind == "buffer of gradients" else (Unit, "unshard")
    allocate, armed = getattr(of, name), []

    def may_fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_it = of is Collectives or self.name == "3"
        if armed and is_it and (kind == "gather in forward" or graph_task() != -1):
            armed.clear()
            raise torch.OutOfMemoryError(MESSAGE)
        return allocate(self, *args, **kwargs)

    monkeypatch.setattr(of, name, may_fail)
    found = train(model, torch.optim.Adam(model.parameters()), lambda: armed.append(True))
    assert not armed
    torch.testing.assert_close(found, expected)
    (error,) = errors
    assert f"\nrank {rank}: memory has run out in the {where}. This rank holds" in str(error)
    engine.close()


@pytest.mark.parametrize("phase", ["forward", *exhaustive("backward")])
@ranks(2, fresh=True)
def test_ranks_that_wait_in_vain_quote_the_one_that_ran_out_of_memory(rank: int, phase: str) -> None:
    model = nn.Sequential(*[Hungry() for _ in range(3)])
    torch_shard.shard(model, units=[Hungry], timeout=3.0, alone="error")
    x = torch.ones(2, 256)
    model(x).sum().backward()
    if rank == 1:
        model[1].fails_in = phase
        with pytest.raises(torch.OutOfMemoryError):
            model(x).sum().backward()
    else:
        with pytest.raises(
            MissingRankError, match=rf"rank 1 ran out of memory in the {phase} of 1 at \S*test_out_of_memory"
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


def test_a_message_without_a_size_still_names_the_command_that_finds_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Hungry())
    torch_shard.shard(model)
    model[0].fails_in = "forward"
    monkeypatch.setitem(globals(), "MESSAGE", "out of memory")
    with pytest.raises(torch.OutOfMemoryError, match="`torch-shard plan` with the script") as caught:
        model(torch.ones(2, 256))
    assert "These settings would free" not in str(caught.value)


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
