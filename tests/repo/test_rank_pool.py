"""The rank pool itself: what every other test on several ranks relies on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.support.ranks
from tests.support.ranks import RankFailure, ranks, run


def identify(rank: int, world_size: int) -> tuple[int, int, int, int]:
    return os.getpid(), rank, dist.get_rank(), dist.get_world_size()


def raise_on_rank_1(rank: int, world_size: int) -> None:
    print(f"rank {rank} says hello")
    if rank == 1:
        spoiled = {"weight": 1}
        assert spoiled["weight"] == 2
    dist.barrier()


def hang_on_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(1000)


def reset_signals(rank: int, world_size: int) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def survive_rank_1(rank: int, world_size: int) -> str:
    if rank == 1:
        os._exit(3)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    return "survived"


def leave_the_group_out_of_step(rank: int, world_size: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1, dtype=torch.int64))


def make_a_group(rank: int, world_size: int) -> int:
    before = len(dist.distributed_c10d._world.pg_map)
    dist.new_group()
    return before


def skip(rank: int, world_size: int) -> None:
    pytest.skip("not today")


@pytest.fixture
def short_grace(monkeypatch):
    """Ranks that hang once another has failed are stopped soon."""
    monkeypatch.setattr(tests.support.ranks, "GRACE", 0.5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_rank_runs_the_function_in_a_process_that_is_kept(world_size):
    first = run(world_size, identify)
    assert [row[1:] for row in first] == [(r, r, world_size) for r in range(world_size)]
    assert run(world_size, identify) == first


def test_a_failing_rank_shows_its_own_traceback_and_output_and_is_replaced(short_grace):
    before = run(2, identify)
    with pytest.raises(RankFailure) as caught:
        run(2, raise_on_rank_1)
    message = str(caught.value)
    assert (caught.value.rank, caught.value.kind) == (1, "AssertionError")
    assert message.startswith("rank 1 of 2 failed:")
    assert 'assert spoiled["weight"] == 2' in message
    assert "assert 1 == 2" in message  # the values, not only the source
    assert "rank 1 says hello" in message
    assert "rank 0 of 2 was stopped" in message and "in barrier" in message
    after = run(2, identify)
    assert not {row[0] for row in before} & {row[0] for row in after}


@pytest.mark.exhaustive
def test_a_hang_ends_at_the_timeout_and_shows_where_it_is():
    run(2, reset_signals)  # as Lightning does at the end of a run; it is the signal that asks for the stacks
    begin = time.monotonic()
    with pytest.raises(RankFailure, match="did not end within 1 s") as caught:
        run(2, hang_on_rank_0, timeout=1)
    assert time.monotonic() - begin < 20
    assert "hang_on_rank_0" in str(caught.value)
    assert len(run(2, identify)) == 2


def test_a_dead_rank_is_reported_and_replaced():
    with pytest.raises(RankFailure, match=r"rank 1 of 2 ended its process .*SIGKILL"):
        run(2, die_on_rank_1)
    assert len(run(2, identify)) == 2


def test_ranks_that_may_die_are_no_failure():
    assert run(2, survive_rank_1, may_die=(1,), group_timeout=10) == ["survived", None]


@pytest.mark.exhaustive
def test_a_test_that_leaves_the_group_out_of_step_fails(short_grace):
    with pytest.raises(RankFailure, match="the test left the"):
        run(2, leave_the_group_out_of_step, timeout=10)


def test_groups_that_a_test_makes_are_gone_in_the_next():
    assert run(2, make_a_group) == run(2, make_a_group)


@pytest.mark.exhaustive
def test_fresh_processes_are_used_once():
    kept = run(2, identify)
    first, second = run(2, identify, fresh=True), run(2, identify, fresh=True)
    assert len({row[0] for row in kept + first + second}) == 6
    assert run(2, identify) == kept


def test_a_skip_on_the_ranks_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="not today"):
        run(2, skip)


@pytest.mark.parametrize("scale", [1.0, 2.0])
@ranks(1, 2, 3)
def test_a_decorated_body_runs_on_every_rank(rank, world_size, device, scale, tmp_path):
    assert isinstance(device, torch.device)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    Path(tmp_path, str(rank)).touch()
    total = torch.full((2,), scale, device=device)
    dist.all_reduce(total)
    assert total.tolist() == [scale * world_size] * 2
    assert len(list(Path(tmp_path).iterdir())) == world_size
