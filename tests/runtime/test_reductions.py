"""In which order gradients are reduced, what is alive meanwhile, and the waits behind it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import Block, Pair, batch
from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from torch_shard.comm.watchdog import Watchdog
from torch_shard.comm.work import Pending, ends_within
from torch_shard.errors import ShardError

BLOCKS = 8
WIDTH = 7


class Tied(nn.Module):
    """As language models are: the first weight used is the last one used, too."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH) for _ in range(BLOCKS)])
        if unused:
            self.blocks[-2].never = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x.abs().mul(10).long() % 11)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _most_whole_gradients(pair: Pair, rank: int, steps: int) -> list[int]:
    """The largest number of units with whole gradients at any moment of each step's backward."""
    units = runtime_of(pair.engine).units
    most = [0]

    def look(*_: object) -> None:
        reductions = runtime_of(pair.engine).reductions
        alive = sum(flat.gradients.flat is not None for unit in units for flat in unit.flats)
        most[-1] = max(most[-1], alive + len(reductions._in_flight))

    for block in pair.model.blocks:
        block.register_full_backward_hook(look)
    for step in range(steps):
        pair.step(lambda model, x: model(x).pow(2).mean().backward(), batch(rank, step))
        most.append(0)
    pair.check()
    return most[:-1]


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64) for _ in range(BLOCKS)))


@pytest.mark.parametrize("offload", [None, "cpu"])
@ranks(2)
def test_what_reductions_hold_was_predicted(rank, offload):
    torch.manual_seed(0)
    model = Stack()
    engine = torch_shard.shard(model, units=["*"], offload=offload)
    reductions, most = runtime_of(engine).reductions, [0]
    buffers = [flat.gradients for unit in runtime_of(engine).units for flat in unit.flats]

    def look(*_: object) -> None:
        making = [each.flat for each in buffers if each.flat is not None]
        moving = [buffer for *_, reduction in reductions._in_flight for buffer in (reduction.grad, reduction.received)]
        most.append(sum(buffer.nbytes for buffer in making + moving))

    for layer in model:
        layer.weight.register_hook(look)
        layer.bias.register_hook(look)
    for step in range(4):
        model(torch.full((4, 64), 1.0 + step + rank)).sum().backward()
    b = engine.plan.predicted
    assert 0 < max(most) <= b.gradient_peak


@ranks(2)
def test_a_tied_weight_holds_up_no_reduction(rank, world_size):
    pair = Pair(Tied, rank, world_size, unit_bytes=300)
    assert max(_most_whole_gradients(pair, rank, 3)) <= 5 < BLOCKS


@ranks(2)
def test_a_parameter_that_never_has_a_gradient_holds_up_the_first_backward_only(rank, world_size):
    pair = Pair(lambda: Tied(unused=True), rank, world_size, unit_bytes=300)
    first, *others = _most_whole_gradients(pair, rank, 4)
    assert first >= BLOCKS - 2
    assert max(others) <= 6


class Scaled(Block):
    """A block with a parameter that rank 0 alone uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))
        self.rank = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.scale if self.rank == 0 else x


@ranks(2)
def test_one_communicator_carries_gradients_that_one_rank_lacks(rank, world_size):
    pair = Pair(
        lambda: nn.Sequential(nn.Linear(5, WIDTH), Block(WIDTH), Scaled(WIDTH), Block(WIDTH)),
        rank,
        world_size,
        unit_bytes=300,
        single_communicator=True,
    )
    pair.model[2].rank = pair.plain[2].rank = rank
    for step in range(4):
        pair.step(lambda model, x: model(x).pow(2).mean().backward(), batch(rank, step))
    pair.check()


@ranks(2)
def test_failed_backwards_leave_no_buffers_behind(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), *(Block(WIDTH) for _ in range(4)))
    engine = torch_shard.shard(model, unit_bytes=300)
    groups = runtime_of(engine).collectives.reduce_channel.groups

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for _ in range(4):
        hook = model[1].register_full_backward_hook(fail)
        out = model(torch.randn(4, 5))
        with pytest.raises(ZeroDivisionError):
            out.sum().backward()
        hook.remove()
    model(torch.randn(4, 5)).sum().backward()
    assert not groups.buffers


# -- waits that only GPUs have, with Gloo in NCCL's place ------------------------------------------------------------------


@ranks(2)
def test_a_blocking_collective_after_a_meeting_gives_the_same_norm(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(WIDTH), nn.BatchNorm1d(WIDTH))
    engine = torch_shard.shard(model, unit_bytes=300)
    model(torch.randn(4, 5)).sum().backward()
    expected = engine.clip_grad_norm_(1e9)
    runtime_of(engine).collectives.watchdog.on_streams = True
    assert torch.equal(engine.clip_grad_norm_(1e9), expected)
    model(torch.randn(4, 5)).sum().backward()


@pytest.mark.exhaustive
@ranks(2)
def test_a_rank_that_alone_meets_for_a_norm_is_an_error_that_names_it(rank, world_size):
    model = nn.Sequential(nn.Linear(5, WIDTH), Block(WIDTH))
    engine = torch_shard.shard(model, timeout=2.0)
    model(torch.randn(4, 5)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # before the first step has ended, the time is longer on streams
    runtime_of(engine).collectives.watchdog.on_streams = True
    if rank == 0:
        with pytest.raises(ShardError, match="rank 0 waited 2 s in clip_grad_norm_"):
            engine.clip_grad_norm_(1.0)


class _EndsAsTheTimeIsUp:
    """A collective that is still going on after the first tick, and ends in the moment in which the next wait times out."""

    def __init__(self, failure: str = "") -> None:
        self.failure, self.waits = failure, 0

    def is_completed(self) -> bool:
        return self.waits >= 2

    def wait(self, timeout: object = None) -> None:
        self.waits += 1
        if self.waits <= 2 or self.failure:
            raise RuntimeError(self.failure or "Timed out")


class _EndsAtTheThirdLook:
    """A collective on a stream; a wait for it makes the stream wait, and the host goes on at once."""

    def __init__(self) -> None:
        self.looks = 0
        self.ended_at_wait: bool | None = None

    def is_completed(self) -> bool:
        self.looks += 1
        return self.looks >= 3

    def wait(self) -> None:
        self.ended_at_wait = self.looks >= 3


def test_the_host_waits_with_a_limit_for_a_collective_on_a_stream_to_end():
    watchdog, channel = SimpleNamespace(on_streams=True), SimpleNamespace(purpose="scalar")
    pending, work = SimpleNamespace(watchdog=watchdog, channel=channel), _EndsAtTheThirdLook()
    assert not ends_within(work, 0.0, pending) and work.ended_at_wait is None
    assert ends_within(work, 60.0, pending) and work.ended_at_wait


@pytest.mark.parametrize("failure", ["", "connection reset"])
@ranks(2)
def test_a_collective_that_ends_as_the_time_of_its_wait_is_up_is_an_error_only_if_it_failed(failure):
    channel = runtime_of(torch_shard.shard(nn.Linear(3, 3))).collectives.watchdog.channels["control"]
    work = _EndsAsTheTimeIsUp(failure)
    with pytest.raises(ShardError, match="a gather failed") if failure else contextlib.nullcontext():
        Pending(Watchdog(0, [0, 1], 5.0, "a test"), channel, 1, "a gather", work).wait()
    assert failure or work.waits == 3


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_optim", "no_shard"])
def test_a_backward_reduces_inside_sync_in_backward_though_its_forward_ran_under_no_sync(rank, strategy):
    torch.manual_seed(0)
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    model, plain = models
    engine = torch_shard.shard(model, strategy=strategy)
    batches = [[torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * r + i)) for i in (0, 1)] for r in (0, 1)]
    with engine.no_sync():
        losses = [model(x).pow(2).sum() for x in batches[rank]]
        losses[0].backward()
    with engine.sync_in_backward():
        losses[1].backward()
    assert engine.require_backward_grad_sync
    (sum(plain(x).pow(2).sum() for own in batches for x in own) / 2).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)


class _TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        return getattr(self, way)(x)


@ranks(2)
def test_a_rank_whose_backward_gives_no_parameter_a_gradient_reduces_with_the_others(rank):
    torch.manual_seed(0)
    models = [_TwoWays(), _TwoWays()]
    models[1].load_state_dict(models[0].state_dict())
    model, plain = models
    engine = torch_shard.shard(model, strategy="no_shard", units=["trained", "frozen"], timeout=10.0)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        with engine.no_sync() if step == 1 else contextlib.nullcontext():
            model(x, ("trained", "frozen")[rank]).pow(2).sum().backward()
        (plain(x, "trained").pow(2).sum() / 2).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)


@ranks(2)
def test_a_rank_alone_differentiates_a_replicated_model_by_its_input(rank):
    model = nn.Linear(4, 3)
    torch_shard.shard(model, strategy="no_shard", timeout=5.0)
    x = torch.ones(2, 4, requires_grad=True)
    loss = model(x).sum()
    if rank == 0:
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        torch.testing.assert_close(grad, model.weight.full_tensor().sum(0).expand(2, 4))
    loss.backward()
    assert model.weight.grad is not None
