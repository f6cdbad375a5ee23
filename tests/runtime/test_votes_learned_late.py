"""Where backwards repeat, a rank publishes gradients before it knows what the others have reduced, and learns it in time."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.support.inside import runtime_of
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard.comm.comparisons import Comparisons
from torch_shard.comm.divergence import OperationSequence
from torch_shard.errors import DivergenceError
from torch_shard.runtime.reduce_schedule import ReduceSchedule
from torch_shard.unit.gradient_buffer import GradientBuffer

WIDTH = 4


class Model(nn.Module):
    """Layers, of which the second may be used twice: inside a reentrant checkpoint, and outside."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    def forward(self, x, twice=False):
        first, second, third = self.layers
        x = first(x)
        if twice:
            x = second(checkpoint(second, x, use_reentrant=True))
        else:
            x = second(second(x))
        return third(x)


def made(**settings):
    torch.manual_seed(0)
    model = Model().double()
    engine = torch_shard.shard(model, **settings)
    return model, engine, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def steps(model, rank, optimizer, each, count, differs=lambda model: {}, backwards=1):
    """Take `count` steps. From the fourth on, `differs` prepares the model, and returns arguments of its forward."""
    data = torch.Generator().manual_seed(rank)
    for number in range(count):
        x = torch.randn(3, WIDTH, generator=data, dtype=torch.float64)
        loss = model(x, **(differs(model) if number >= 3 else {})).square().sum()
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
        each()
        optimizer.step()
        optimizer.zero_grad()


def blocking(monkeypatch):
    """Return a list that gets an entry for each comparison that the host waits for at once."""
    found, plain_call = [], Comparisons.all_reduce

    def all_reduce(self, watchdog, message, flags, what, *args):
        found.append(what)
        return plain_call(self, watchdog, message, flags, what, *args)

    monkeypatch.setattr(Comparisons, "all_reduce", all_reduce)
    return found


@pytest.mark.parametrize("clips", [False, True])
@ranks(2)
def test_a_step_that_repeats_waits_for_no_message(rank, clips, monkeypatch):
    model, engine, optimizer = made()
    clip = (lambda: engine.clip_grad_norm_(1.0)) if clips else (lambda: None)
    found = blocking(monkeypatch)
    steps(model, rank, optimizer, clip, 3)
    assert found
    found.clear()
    steps(model, rank, optimizer, clip, 3)
    assert not found


def unfreeze(model):
    model.layers[1].bias.requires_grad_()
    return {}


# What rank 1 does differently from the fourth step on, after rank 0 has published its gradients.
DIFFERENCES = {"a parameter that is frozen elsewhere": unfreeze, "a second reduction": lambda model: {"twice": True}}
READERS = {
    "nobody": lambda engine, model: None,
    "clipping": lambda engine, model: engine.clip_grad_norm_(0.5),
    "grad": lambda engine, model: [p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None],
    "clearing": lambda engine, model: [setattr(p, "grad", None) for p in model.layers[1].parameters()],
}


@pytest.mark.parametrize("reader", quick(READERS, ["nobody", "clipping"]))
@pytest.mark.parametrize("difference", DIFFERENCES)
@ranks(2)
def test_what_other_ranks_have_in_addition_counts(rank, difference, reader, monkeypatch):
    late, plain_call = [], ReduceSchedule.compare_late

    def compare_late(self, votes, answer):
        late.append(votes != answer.tolist())
        plain_call(self, votes, answer)

    monkeypatch.setattr(ReduceSchedule, "compare_late", compare_late)
    early, plain = (trained(rank, difference, monkeypatch, READERS[reader], early=early) for early in (True, False))
    assert rank == 1 or any(late), "no answer came late"
    assert all(map(torch.equal, early, plain))


@pytest.mark.exhaustive
@pytest.mark.parametrize("difference", DIFFERENCES)
@ranks(2)
def test_a_second_backward_of_one_graph_comes_behind_the_votes_of_the_first(rank, difference, monkeypatch):
    early, plain = (trained(rank, difference, monkeypatch, early=early, backwards=2) for early in (True, False))
    assert all(map(torch.equal, early, plain))


@pytest.mark.parametrize("difference", DIFFERENCES)
@ranks(2)
def test_votes_that_come_before_the_gradients_are_published_count(rank, difference, monkeypatch):
    plain_call = GradientBuffer.collect

    def collect(self, reduction):
        current[0].operations.finish()  # as a rank does that waits for a reduction
        plain_call(self, reduction)

    current = []
    found = []
    for early in (True, False):
        monkeypatch.setattr(GradientBuffer, "collect", collect if early else plain_call)
        found.append(trained(rank, difference, monkeypatch, early=early, current=current))
    assert all(map(torch.equal, *found))


def trained(rank, difference, monkeypatch, reader=READERS["nobody"], early=True, backwards=1, current=None):
    """Return this rank's shards after six steps. `current` gets the runtime."""
    with monkeypatch.context() as patch:
        if not early:
            patch.setattr(ReduceSchedule, "_may_publish_early", never)
        model, engine, optimizer = made(strategy="no_shard")  # no gather stops a rank that does something else
        if current is not None:
            current[:] = [runtime_of(engine)]
        model.layers[1].bias.requires_grad_(difference == "a second reduction")
        differs = DIFFERENCES[difference] if rank == 1 else lambda model: {}
        steps(model, rank, optimizer, lambda: reader(engine, model), 6, differs, backwards)
        return [p.detach().to_local().clone() for p in model.parameters()]


def never(self):
    return False


@ranks(2)
def test_gradients_are_taken_back_where_the_ranks_turn_out_to_differ(rank, monkeypatch):
    model, _, optimizer = made()
    steps(model, rank, optimizer, lambda: None, 3)
    before = [p.detach().to_local().clone() for p in model.parameters()]
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    model(x).sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(OperationSequence, "_have_all_come", apart)
        with pytest.raises(DivergenceError, match="apart"):
            optimizer.step()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    assert all(map(torch.equal, [p.detach().to_local() for p in model.parameters()], before))
    steps(model, rank, optimizer, lambda: None, 2)
    assert not all(map(torch.equal, [p.detach().to_local() for p in model.parameters()], before))


def apart(self, comparison, message):
    raise DivergenceError("apart")


@ranks(2)
def test_a_step_that_one_rank_has_left_out_is_an_error_before_parameters_change_again(rank):
    model, _, optimizer = made(strategy="no_shard", timeout=4.0)
    steps(model, rank, optimizer, lambda: None, 3)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    model(x).sum().backward()
    if rank == 0:
        optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().to_local().clone() for p in model.parameters()]
    with pytest.raises(DivergenceError, match="not made the same changes"):
        model(x).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, [p.detach().to_local() for p in model.parameters()], before))


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2)
def test_a_rank_may_evaluate_alone_while_another_is_in_a_forward_that_repeats(rank, strategy):
    model, _, optimizer = made(strategy=strategy, timeout=8.0)
    steps(model, rank, optimizer, lambda: None, 3)
    x = torch.ones(1, WIDTH, dtype=torch.float64)
    for reads in (1, 2, 3):
        if rank == 1:
            with torch.no_grad():
                values = {model(x).sum().item() for _ in range(reads)}
            assert len(values) == 1
        loss = model(x).sum()
        total = loss.detach().clone()
        dist.all_reduce(total)  # as scripts do to log the mean
        assert total == 2 * loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
