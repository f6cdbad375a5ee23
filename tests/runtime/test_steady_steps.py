"""From its third step on, a training that repeats itself needs no agreement on what is gathered, and asks no rank's service."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.followed import followed
from tests.support.ranks import ranks
from torch_shard.comm.divergence import OperationSequence
from torch_shard.comm.one_sided.partners import Partners
from torch_shard.comm.one_sided.service import Service


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optim"])
@ranks(2)
def test_gathers_are_predicted(
    rank: int, monkeypatch: pytest.MonkeyPatch, strategy: Any, prefetch: int, micro_batches: int
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    torch_shard.shard(model, strategy=strategy, prefetch=prefetch, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    asked: list[str] = []
    check = OperationSequence.check

    def counted(operations: OperationSequence, what: str, *args: Any) -> Any:
        asked.append(what)
        return check(operations, what, *args)

    monkeypatch.setattr(OperationSequence, "check", counted)
    steps = []
    for _ in range(6):
        asked.clear()
        with followed(monkeypatch) as found:
            for _ in range(micro_batches):
                model(torch.randn(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        steps.append((found, [what for what in asked if what.startswith("the agreement to gather")]))
    gathers, agreements = steps[-1]
    assert not agreements
    assert all(step == (gathers, []) for step in steps[2:])


class Forces(nn.Module):
    """Differentiates what one layer gives before it uses the next one, as models of molecules do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))  # a unit whose forward is around both layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).square().sum(), x)
        result: torch.Tensor = self.head(force) * self.scale
        return result


@ranks(2)
def test_a_backward_inside_a_forward_gathers_nothing_for_the_rest_of_the_forward(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Forces()
    torch_shard.shard(model, units=[nn.Linear], prefetch=0)
    for _ in range(3):
        with followed(monkeypatch) as found:
            model(torch.randn(4, 16)).square().mean().backward()
        gathers = [name for what, name in found if what == "gather"]
        assert gathers.count("energy") == gathers.count("head") == 1, gathers


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optim"])
@ranks(2)
def test_nothing_is_asked_of_a_service_unless_a_rank_reads_alone(
    rank: int, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    torch_shard.shard(model, strategy=strategy, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sent: list[str] = []
    answered: list[str] = []
    ask, tell, answer = Partners.ask, Partners.tell, Service._answer

    def asks(partners: Partners, to: int, **question: Any) -> Any:
        sent.append(question["ask"])
        return ask(partners, to, **question)

    def tells(partners: Partners, to: int, **message: Any) -> None:
        sent.append(message["ask"])
        tell(partners, to, **message)

    def answers(service: Service, link: Any, request: dict[str, Any], *args: Any) -> None:
        answered.append(request["ask"])
        answer(service, link, request, *args)

    monkeypatch.setattr(Partners, "ask", asks)
    monkeypatch.setattr(Partners, "tell", tells)
    monkeypatch.setattr(Service, "_answer", answers)
    for step in range(6):
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            dist.barrier()  # what the first steps have asked has been answered
            sent.clear()
            answered.clear()
    dist.barrier()
    assert (sent, answered) == ([], [])
    if rank == 0:
        model[0].weight.detach().norm()
    dist.barrier()
    assert bool(sent) == (rank == 0)
    assert bool(answered) == (rank == 1)
