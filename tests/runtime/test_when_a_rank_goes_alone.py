"""When a rank that reads the model stops waiting for the others: at once where they are seen waiting for something else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.runtime.test_lone_reads import TOKENS, made, same
from tests.support.inside import runtime_of
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard.comm.one_sided.partners import Partners, Reading
from torch_shard.comm.work import Pending
from torch_shard.errors import DivergenceError

TRIES = 10
NOTICED = 0.05  # seconds, by the documentation
LATE = 30.0  # seconds that a partner which computes would be given


def receive(model: nn.Module) -> None:
    """Wait for a message of rank 0, which reads first."""
    if dist.get_rank() == 0:
        for other in range(1, dist.get_world_size()):
            dist.send(torch.zeros(1), other)
    else:
        dist.recv(torch.zeros(1), 0)


WAITS: dict[str, Callable[[nn.Module], Any]] = {
    "a barrier": lambda model: dist.barrier(),
    "an all-reduce": lambda model: dist.all_reduce(torch.zeros(1)),
    "objects": lambda model: dist.all_gather_object([None] * dist.get_world_size(), "one"),
    "a message": receive,
    "the engine's next forward": lambda model: model(torch.ones(1, 4)).sum().backward(),
}


def counted(counts: dict[str, float]) -> None:
    """Have `counts` hold the questions that a reader asks, the seconds that it chooses to wait, and when it begins to read."""
    asks, waits, begins = Partners.ask, Pending.wait_at_most, Reading.__init__

    def ask(self: Partners, rank: int, **question: Any) -> Any:
        counts["questions"] += question["ask"] == "whereabouts"
        return asks(self, rank, **question)

    def wait_at_most(self: Pending, seconds: float) -> bool:
        counts["waits"] += seconds
        return waits(self, seconds)

    def begin(self: Reading, *args: Any) -> None:
        counts["began"] = time.monotonic()
        begins(self, *args)

    Partners.ask, Pending.wait_at_most, Reading.__init__ = ask, wait_at_most, begin  # type: ignore[method-assign]


@pytest.mark.parametrize("records", [False, True], ids=["reads", "records"])
@pytest.mark.parametrize("where", quick(WAITS, ["a barrier"]))
@ranks(2, exhaustive=(3,), fresh=True, timeout=100)
def test_partners_that_wait_for_something_else_are_left_within_50_ms(
    rank: int, world_size: int, where: str, records: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = torch_shard.shard(model, units=["0", "1"], alone_after=LATE)
    counts = {"questions": 0.0, "waits": 0.0, "began": 0.0}
    counted(counts)
    seconds = []
    for _ in range(TRIES):
        model(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        if rank == 0:
            time.sleep(0.1)  # the others wait by now
            counts.update(questions=0, waits=0)
            begin = time.monotonic()
            with torch.set_grad_enabled(records):
                model[0].weight.norm()
            seconds.append(counts["began"] - begin)
            # A partner is asked twice, since it has to stay in its place; how late it was scheduled is not the reader's fault.
            assert counts["questions"] <= 2 * (world_size - 1), counts
            assert counts["waits"] <= NOTICED, counts
        WAITS[where](model)
    assert engine.statistics().lone_reads == (TRIES if rank == 0 else 0)
    if rank == 0:
        assert min(seconds) <= NOTICED, seconds


FRAMEWORKS = [
    "accelerate.utils.operations",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.plugins.collectives.torch_collective",
    "lightning_fabric.utilities.distributed",
    "lightning_fabric.plugins.collectives.torch_collective",
]


@pytest.mark.parametrize("module", quick(FRAMEWORKS, FRAMEWORKS[:1]))
@ranks(2)
def test_a_partner_that_waits_for_a_device_in_a_function_of_a_framework_is_left_at_once(rank: int, module: str) -> None:
    """The result of a collective is waited for where it is used, which may be behind torch's function."""
    store, begin = dist.PrefixStore(module, dist.distributed_c10d._get_default_store()), time.monotonic()

    def use() -> None:
        store.wait(["read"])

    model = nn.Linear(4, 4)
    engine = torch_shard.shard(model, alone_after=LATE)
    if rank == 0:
        with torch.no_grad():
            model.weight.norm()
        store.set("read", "")
    else:
        FunctionType(use.__code__, {"__name__": module}, closure=use.__closure__)()
    assert time.monotonic() - begin < LATE / 2
    assert engine.statistics().lone_reads == (rank == 0)


@ranks(2)
def test_a_partner_that_computes_is_left_after_the_time_that_was_set(rank: int) -> None:
    model = nn.Linear(4, 4)
    engine = torch_shard.shard(model, alone_after=0.4)
    if rank == 0:
        begin = time.monotonic()
        with torch.no_grad():
            model.weight.norm()
        assert time.monotonic() - begin >= 0.4
    else:
        time.sleep(2)
    dist.barrier()
    assert engine.statistics().lone_reads == (rank == 0)


@ranks(2)
def test_a_lone_read_that_records_gradients_does_not_meet_the_forward_of_the_others(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = torch_shard.shard(model, units=["0", "1"])
    for _ in range(3):
        if rank == 0:
            torch.ones(2, 4) @ model[0].weight.T
        model(torch.ones(1, 4)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
    assert engine.statistics().lone_reads == (3 if rank == 0 else 0)


@ranks(2)
def test_ranks_that_all_record_gradients_do_not_go_alone(rank: int) -> None:
    """Each would come to its backward with values that no other rank has read."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = torch_shard.shard(model, units=["0", "1"])
    with pytest.raises(DivergenceError, match=r"rank 0: .* 0\.weight .*rank 1: .* 1\.weight"):
        torch.ones(2, 4) @ model[rank].weight.T
    assert engine.statistics().lone_reads == 0


@ranks(2)
def test_no_memory_is_kept_of_what_a_rank_has_left_once_it_is_back(rank: int) -> None:
    model = nn.Linear(4, 4)
    engine = torch_shard.shard(model, alone_after=LATE)
    groups = runtime_of(engine).collectives.watchdog.channels["control"].groups
    before = set(groups.buffers)
    if rank == 0:
        with torch.no_grad():
            model.weight.norm()
        assert len(groups.buffers) == len(before) + 1  # the other rank still comes to this comparison
    dist.barrier()
    model(torch.ones(1, 4))
    assert engine.statistics().lone_reads == (rank == 0)
    assert set(groups.buffers) <= before


READS: dict[str, Callable[[nn.Module, torch_shard.Engine, torch.optim.Optimizer], Any]] = {
    "a value that records gradients": lambda model, engine, optimizer: model.blocks[0][0].weight.norm(),
    "optimizer state": lambda model, engine, optimizer: engine.optim_state_dict(optimizer),
}


@pytest.mark.parametrize("read", READS)
@ranks(2, exhaustive=(3,))
def test_it_reads_between_a_forward_and_its_backward_in_which_the_others_wait_for_it(rank: int, read: str) -> None:
    """By then they compare nothing before they gather what follows every time."""
    sharded, engine, plain = made(norm=nn.LayerNorm, timeout=10)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (sharded, plain)]
    for _ in range(4):
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            loss = model(TOKENS).square().mean()
            if rank == 0 and model is sharded:
                READS[read](sharded, engine, optimizer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert engine.statistics().lone_reads == (4 if rank == 0 else 0)
    same(engine.state_dict(rank0_only=False), plain.state_dict())
