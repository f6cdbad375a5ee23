"""What travels between ranks and when, and what each rank holds: prefetch, bytes sent, gathered units, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, train_both
from tests.support.collectives import Collectives
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

ITEM = 8  # bytes of a float64


class Chain(nn.Module):
    """An embedding and a row of layers of one size, a unit each; any of 2 to 5 ranks divides all of them, so that
    nothing is padded.

    It notes when the forward and the backward of each layer end.
    """

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(layers)])
        self.events: list[str] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            # A node between the layers, which no unit has to do with: the gradient of x is there when the layer's
            # backward is through.
            x = x * 1.0
            if x.requires_grad:
                x.register_hook(lambda grad, i=i: self.events.append(f"end of backward {i}"))
            x = torch.tanh(layer(x))
            self.events.append(f"end of forward {i}")
        return x


UNITS = [nn.Embedding, nn.Linear]
EMBEDDING, LAYER = 30 * 24, 24 * 24 + 24  # elements


def tokens(rank: int, step: int) -> torch.Tensor:
    return torch.randint(0, 30, (4, 6), generator=torch.Generator().manual_seed(100 * step + rank))


# -- prefetch -----------------------------------------------------------------------------------------------------------


def watch_gathers(pair: Pair) -> None:
    """Let the sharded model note each gather that is issued, too."""
    for number, unit in enumerate(pair.engine.units):

        def unshard(from_secondary: bool, unit: Any = unit, number: int = number, issue: Any = unit.unshard) -> None:
            if unit.state.value == "sharded":  # else there is nothing to issue
                pair.model.events.append(f"gather {number - 1}")  # the embedding is -1
            issue(from_secondary)

        unit.unshard = unshard


def place(events: list[str], event: str) -> int:
    """Where an event is in a list; -1, before all others, if it is not there: nothing precedes the first layer."""
    return events.index(event) if event in events else -1


@pytest.mark.parametrize("ahead", [*exhaustive(0), 1, *exhaustive(2)])
@ranks(2, exhaustive=(3,))
def test_units_are_gathered_as_far_ahead_as_prefetch_says(rank, world_size, ahead):
    pair = Pair(Chain, rank, world_size, units=UNITS, prefetch=ahead)
    watch_gathers(pair)
    for step in range(3):
        pair.model.events.clear()
        pair.step(plain_backward, tokens(rank, step))
        events = list(pair.model.events)
        last = len(pair.model.layers) - 1
        turn = events.index(f"end of forward {last}")
        forward, backward = events[: turn + 1], events[turn + 1 :]
        # The order is not known in the first step: then nothing is gathered ahead.
        far = ahead if step else 0
        for i in range(last + 1):
            gathered = place(forward, f"gather {i}")
            assert gathered >= 0, events
            # While the layer that lies `far` before it runs: not earlier, and not later.
            assert gathered < place(forward, f"end of forward {i - far}") or i < far, (i, events)
            assert gathered > place(forward, f"end of forward {i - far - 1}"), (i, events)
        for i in reversed(range(last)):
            gathered = place(backward, f"gather {i}")
            assert gathered >= 0, events
            before = place(backward, f"end of backward {i + far}")
            assert gathered < before or i + far > last, (i, events)
            assert gathered > place(backward, f"end of backward {i + far + 1}"), (i, events)
    pair.check()


# -- bytes --------------------------------------------------------------------------------------------------------------


def bytes_of_a_step(strategy: str, world_size: int, layers: int) -> int:
    """What a rank sends for parameters and gradients in one step of a `Chain`."""
    everything = EMBEDDING + layers * LAYER
    elements = {
        # Gathered for forward, again for backward, and reduced. Backward needs nothing of the embedding, whose
        # weights no gradient depends on, and finds the last layer still gathered.
        "full_shard": 3 * everything - EMBEDDING - LAYER,
        "shard_grad_op": 2 * everything,  # gathered once
        "no_shard": 2 * everything,  # an all-reduce
    }[strategy]
    assert elements * ITEM * (world_size - 1) % world_size == 0
    return elements * ITEM * (world_size - 1) // world_size


def sent(collectives: Collectives, world_size: int) -> int:
    """Bytes that a rank sends in these collectives, over whole numbers of rounds of broadcasts."""
    total = 0
    for name, nbytes, dtypes, _ in collectives.calls:
        if name == "allreduce_":
            if dtypes == {torch.uint8}:  # ranks compare what they do: no parameters, no gradients
                assert nbytes < 200
                continue
            total += 2 * nbytes * (world_size - 1)
        else:
            # Each rank's slot is broadcast once, which is sent by one of the ranks to all others.
            assert name in ("broadcast_", "_allgather_base_", "alltoall_base_"), name
            total += nbytes * (world_size - 1) * (world_size if name == "_allgather_base_" else 1)
    assert total % world_size == 0
    return total // world_size


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(3, exhaustive=(2, 4, 5))
def test_a_step_sends_the_bytes_that_the_formula_says(rank, world_size, strategy):
    pair = Pair(Chain, rank, world_size, units=UNITS, strategy=strategy)
    for step in range(3):
        before = pair.engine.bytes_sent
        with Collectives() as seen:
            plain_backward(pair.model, tokens(rank, step))
            pair.optimizer.step()
            pair.optimizer.zero_grad()
        expected = bytes_of_a_step(strategy, world_size, layers=5)
        assert pair.engine.bytes_sent - before == expected
        assert sent(seen, world_size) == expected
        # From five ranks on, an all-gather is cheaper than broadcasts.
        assert not seen.named("broadcast_" if world_size > 4 else "_allgather_base_")


class Running(nn.Module):
    """Buffers, which follow those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.mean


def buffers_follow(model: nn.Module, engine: torch_shard.Engine) -> int:
    model(torch.ones(2, 6))
    return sum(b.nbytes for b in model.buffers())


def one_rank_edits(model: nn.Module, engine: torch_shard.Engine) -> int:
    with engine.gathered(model, write=True, ranks=[1]), torch.no_grad():
        if dist.get_rank() == 1:
            for p in model.parameters():
                p.add_(1)
    return sum(f.shard.nbytes for u in engine.units for f in u.flats)


def every_rank_edits(model: nn.Module, engine: torch_shard.Engine) -> int:
    with engine.gathered(model, write=True), torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    return sum(f.shard.nbytes for u in engine.units for f in u.flats)


@pytest.mark.parametrize(("send", "source"), [(buffers_follow, 0), (one_rank_edits, 1), (every_rank_edits, 0)])
@ranks(3)
def test_a_broadcast_counts_where_it_comes_from_once_for_each_rank_that_receives_it(send, source, rank):
    model = Running()
    engine = torch_shard.shard(model, strategy="no_shard")
    before = engine.statistics()
    nbytes = send(model, engine)
    counted = engine.statistics().since(before)
    assert counted.bytes_sent == counted.bytes_sent_across == (2 * nbytes if rank == source else 0)


@ranks(4)
def test_a_broadcast_between_copies_counts_like_any_other(rank):
    model = Running()
    engine = torch_shard.shard(model, strategy="hybrid_shard", shard_size=2)
    before = engine.statistics()
    nbytes = every_rank_edits(model, engine)
    counted = engine.statistics().since(before)
    gathered = nbytes  # from the other rank of the copy
    assert counted.bytes_sent_across == (nbytes if rank < 2 else 0)
    assert counted.bytes_sent - counted.bytes_sent_across == gathered


# -- gathered units -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [*exhaustive(0), 1, *exhaustive(2)])
@ranks(2, exhaustive=(3,))
def test_full_shard_holds_few_gathered_units_at_once_as_the_plan_predicts(rank, world_size, prefetch):
    pair = Pair(lambda: Chain(layers=8), rank, world_size, units=UNITS, prefetch=prefetch)
    for step in range(3):
        pair.step(plain_backward, tokens(rank, step))
    found = pair.engine.statistics().peak_gathered
    assert found == pair.engine.plan.predicted.gathered_peak
    # The unit that runs and those gathered ahead of it.
    assert (prefetch + 1) * LAYER * ITEM <= found <= (EMBEDDING + prefetch * LAYER) * ITEM


# -- settings that change how, and not what -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("setting", ["debug", *exhaustive("single_communicator")])
@ranks(2, exhaustive=(3,))
def test_debug_and_a_single_communicator_train_like_plain(rank, world_size, strategy, setting):
    train_both(MLP, rank, world_size, strategy=strategy, steps=4, **{setting: True})


class Numpy(nn.Module):
    """Edits its weight through a NumPy array, which leaves no trace that could be followed, when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(5, 7), nn.Linear(7, 3)
        self.edit = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edit:
            self.lin.register_forward_pre_hook(_edit_once)
        return self.head(torch.tanh(self.lin(x)))


def _edit_once(module: nn.Module, args: Any) -> None:
    module.weight.detach().numpy()[1:3] *= 0.5
    module._forward_pre_hooks.popitem()


@ranks(2, exhaustive=(3,))
def test_debug_finds_edits_through_numpy_in_every_iteration(rank, world_size):
    pair = Pair(Numpy, rank, world_size, unit_bytes=100, debug=True)
    for step in range(6):
        for model in (pair.model, pair.plain):
            model.edit = step in (0, 4)  # late, too: without `debug` it is looked for in the first two iterations
        pair.step(plain_backward, batch(rank, step))
    pair.check()


def communicators(rank: int, single: bool) -> tuple[set[str], set[str]]:
    """Names of the process groups that gathers and reductions use in one step of a new engine."""
    model = MLP().double()
    torch_shard.shard(model, unit_bytes=500, single_communicator=single)
    with Collectives() as seen:
        plain_backward(model, batch(rank, 0))
    return {call[3] for call in seen.named("broadcast_")}, {call[3] for call in seen.named("alltoall_base_")}


@pytest.mark.parametrize("single_first", [True, *exhaustive(False)])
@ranks(2)
def test_the_choice_of_a_single_communicator_is_each_engines_own(rank, single_first):
    for single in (single_first, not single_first):
        # Both over the same ranks: the second must not inherit the first one's choice.
        gathers, reductions = communicators(rank, single)
        assert len(gathers) == len(reductions) == 1 and (gathers == reductions) == single


# -- memory ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(2, exhaustive=(1, 3))
def test_between_steps_a_rank_holds_its_share_and_nothing_gathered(rank, world_size, strategy):
    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    pair = Pair(Chain, rank, world_size, units=UNITS, strategy=strategy, optimizer=adam)
    share = (EMBEDDING + 5 * LAYER) * ITEM // (1 if strategy == "no_shard" else world_size)
    counts = len(list(pair.model.parameters())) * 4  # Adam's number of steps, one float32 for each parameter

    def check(gradients: int, optimizer: int) -> None:
        assert pair.engine.memory_summary(pair.optimizer) == {
            "parameters": share,
            "gradients": gradients,
            "optimizer": optimizer,
            "gathered": 0,
        }
        if world_size > 1 and strategy != "no_shard":
            # The buffers themselves, past the summary.
            assert all(f.full.untyped_storage().nbytes() == 0 for u in pair.engine.units for f in u.flats)
            assert all(f.gradients.flat is None for u in pair.engine.units for f in u.flats)

    check(0, 0)
    for step in range(3):
        pair.backward(plain_backward, tokens(rank, step))
        check(share, 2 * share + counts if step else 0)
        pair.optimizer.step()
        check(share, 2 * share + counts)
        pair.optimizer.zero_grad()
        check(0, 2 * share + counts)
        with torch.no_grad():
            pair.model(tokens(rank, step))
        check(0, 2 * share + counts)


@ranks(2)
def test_under_no_sync_the_gradient_held_is_counted_until_it_is_dropped(rank, world_size):
    pair = Pair(Chain, rank, world_size, units=UNITS)
    whole = (EMBEDDING + 5 * LAYER) * ITEM
    with pair.engine.no_sync():
        plain_backward(pair.model, tokens(rank, 0))
    # The whole gradient, of which `.grad` shows this rank's slice.
    assert whole <= pair.engine.memory_summary()["gradients"] <= whole + whole // world_size
    plain_backward(pair.model, tokens(rank, 1))
    assert pair.engine.memory_summary()["gradients"] == whole // world_size
    pair.model.zero_grad()
    assert pair.engine.memory_summary()["gradients"] == 0
