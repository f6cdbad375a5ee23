"""What concerns all ranks is an error where one rank does it alone, which names the lines of this rank and of another one."""

from __future__ import annotations

import copy
import io
import linecache
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import exhaustive, quick
from tests.support.ranks import run
from torch_shard.errors import ShardError

LIMIT = 4.0
X = torch.arange(8.0).view(1, 8)
Work = Callable[[nn.Module], Any]


def made() -> tuple[nn.Module, nn.Module]:
    """Return a sharded and a plain model, with gradients."""
    torch.manual_seed(0)
    sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plain = copy.deepcopy(sharded)
    torch_shard.shard(sharded, units=["0", "1"], timeout=LIMIT, alone_after=0.1)
    for model in (sharded, plain):
        step(model)
    return sharded, plain


def step(model: nn.Module) -> None:
    model(X).square().sum().backward()


def error_of(work: Work, model: nn.Module) -> str:
    """Return the error with which `work` ends, after no more than the limit; "" if it ends without."""
    begin = time.monotonic()
    try:
        work(model)
    except ShardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        assert time.monotonic() < begin + 3 * LIMIT + 5
    return ""


def lines_of(error: str) -> list[str]:
    """Return the code of the lines that an error names."""
    numbers = re.findall(rf"{re.escape(__file__)}:(\d+)", error)
    return [linecache.getline(__file__, int(number)).strip() for number in numbers]


# -- backward, edits, steps ----------------------------------------------------------------------------------------


def backward_of_a_value(model: nn.Module) -> None:
    norm = model[0].weight.norm()  # the reader's line
    norm.backward()


def training_step(model: nn.Module) -> None:
    loss = model(X).square().sum()  # the reader's line
    loss.backward()


def edit(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)  # the reader's line
        model(X)


def optimizer_step(model: nn.Module) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # the reader's line
    with torch.no_grad():
        model[1].weight.norm()


ALONE: dict[str, Work] = {f.__name__: f for f in (backward_of_a_value, training_step, edit, optimizer_step)}


def sleeps(model: nn.Module) -> None:
    time.sleep(3 * LIMIT)  # the other's line


def waits(model: nn.Module) -> None:
    dist.barrier()  # the other's line


def trains(model: nn.Module) -> None:
    time.sleep(1)
    model(X).sum().backward()  # the other's line


ELSEWHERE: dict[str, Work] = {f.__name__: f for f in (sleeps, waits, trains)}
JOINS = ("training_step", "trains")  # which is no error


def alone(rank: int, world_size: int, what: str, where: str) -> str:
    model, _ = made()
    if rank > 0:
        return error_of(ELSEWHERE[where], model)
    found = error_of(ALONE[what], model)
    if where == "waits":
        dist.barrier()
    elif where == "trains" and what == "backward_of_a_value":
        step(model)
    elif where == "trains" and what in ("edit", "optimizer_step"):
        assert "have not made the same changes" in error_of(step, model)
    return found


@pytest.mark.parametrize(
    ("what", "where"),
    [
        ("training_step", "waits"),
        ("edit", "waits"),
        *exhaustive(("backward_of_a_value", "waits"), ("optimizer_step", "waits")),
        *exhaustive(*((what, where) for what in ALONE for where in ("sleeps", "trains") if (what, where) != JOINS)),
    ],
)
def test_it_names_the_lines_of_both_ranks(what: str, where: str) -> None:
    error, other = run(2, alone, what, where, fresh=True, timeout=60)
    lines = lines_of(error)
    assert any(line.endswith("the reader's line") for line in lines), (error, lines)
    assert any(line.endswith("the other's line") or "step(model)" in line for line in lines), (error, lines)
    if where == "trains" and what in ("edit", "optimizer_step"):
        assert "have not made the same changes" in other, other


# -- gradients -----------------------------------------------------------------------------------------------------


def saved(grad: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(grad, file)
    return torch.load(io.BytesIO(file.getvalue()))


GRADIENTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a norm": lambda grad: grad.norm(),
    "norms": lambda grad: torch.stack(torch._foreach_norm([grad])),
    "an item": lambda grad: grad[0, 0].item(),
    "numbers": lambda grad: grad.tolist(),
    "an array": lambda grad: torch.tensor(grad.numpy()),
    "a row": lambda grad: grad[1].tolist(),
    "a product": lambda grad: grad @ torch.ones(8, 2),
    "a sum": lambda grad: (torch.zeros(8, 8) + grad).tolist(),
    "a sum over one dimension": lambda grad: grad.sum(0),
    "a plain copy": lambda grad: torch.zeros(8, 8).copy_(grad),
    "a copy": lambda grad: copy.deepcopy(grad).tolist(),
    "a clone": lambda grad: grad.detach().cpu().clone().tolist(),
    "the largest": lambda grad: grad.abs().max(),
    "a truth": lambda grad: bool(grad.isnan().any()),
    "a file": saved,
}


READ_WHERE = [
    *((what, "trains") for what in GRADIENTS),
    *(("a norm", where) for where in ELSEWHERE if where != "trains"),
]


def gradient(rank: int, world_size: int, what: str, where: str) -> tuple[str, str]:
    """Return this rank's error, and what differs if there is none."""
    model, plain = made()
    if rank > 0:
        return error_of(ELSEWHERE[where], model), ""
    found: list[Any] = []
    error = error_of(lambda model: found.append(GRADIENTS[what](model[0].weight.grad)), model)  # the reader's line
    if where == "waits":
        dist.barrier()
    try:
        if found:
            torch.testing.assert_close(found[0], GRADIENTS[what](plain[0].weight.grad))
    except AssertionError as difference:
        return error, str(difference)
    return error, ""


@pytest.mark.parametrize(("what", "where"), quick(READ_WHERE, [("a norm", "trains"), ("a file", "trains")]))
def test_a_gradient_read_alone_is_right_or_an_error_but_never_this_ranks_part(what: str, where: str) -> None:
    (error, difference), _ = run(2, gradient, what, where, fresh=True, timeout=60)
    assert not difference, difference
    if error:
        assert error.startswith(("DivergenceError", "MissingRankError", "ShardPicklingError")), error
        if not error.startswith("ShardPicklingError"):
            lines = lines_of(error)
            assert any("the other's line" in line for line in lines), (error, lines)
