"""The end of a script on one rank while another one still reads: who stays, how long, and what happens if a rank dies there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks as on_ranks
from tests.support.run_python import variables
from torch_shard.comm import process_groups
from torch_shard.comm.one_sided import departure
from torch_shard.errors import MissingRankError

LIMIT = 8.0  # seconds that a rank stays for another one, where that matters
DIED = 9
MISSED = 4


def ranks(way: str, world_size: int) -> tuple[list[int], list[str]]:
    """Run :func:`script` in processes that end as scripts do; return their exit codes and what they have printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, way],
            env=variables(RANK=str(rank), MASTER_PORT=port, **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=90.0)[0])
            if way == "limit":
                processes[1].kill()  # rank 0 has ended, although this one has not
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def script(way: str) -> None:
    departure._SLOW, departure._LOOK = 1.0, 0.2
    rank = int(os.environ["RANK"])
    if way == "limit":
        stay = process_groups.stay_until_all_leave
        process_groups.stay_until_all_leave = lambda service, partners, _: stay(service, partners, LIMIT)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    engine = torch_shard.shard(model, units=["0", "1", "2", "3"], timeout=120.0, alone_after=0.1)
    together = read(model)
    dist.barrier()
    WAYS[way](rank, model, engine, together)


def read(model: nn.Module) -> float:
    with torch.no_grad():
        return model(torch.ones(1, 8)).sum().item()


def late(rank: int, model: nn.Module, engine: Any, together: float) -> None:
    """Rank 1 reads when rank 0 has ended long since."""
    if rank == 1:
        time.sleep(3)
        assert read(model) == together


def limit(rank: int, model: nn.Module, engine: Any, together: float) -> None:
    """Rank 1 goes on for longer than a rank waits that has ended."""
    if rank == 1:
        time.sleep(600)


def fails(rank: int, model: nn.Module, engine: Any, together: float) -> None:
    """Rank 1 ends by an exception, and rank 0 reads later."""
    if rank == 1:
        raise ValueError("of the user")
    time.sleep(3)
    tries_to_read(model)


def trains_on(rank: int, model: nn.Module, engine: Any, together: float) -> None:
    """Rank 1 ends after steps that repeat, and rank 0 trains on."""
    try:
        for _ in range(4 if rank == 1 else 5):
            model(torch.ones(1, 8)).sum().backward()
    except MissingRankError:
        sys.exit(MISSED)


def stops_threads(rank: int, model: nn.Module, engine: Any, together: float) -> None:
    """Rank 0 stops the threads that serve rank 1, which has read alone before."""
    if rank == 1:
        assert read(model) == together
    dist.barrier()
    if rank == 0:
        left: list[Any] = [thread for thread in threading.enumerate() if thread.name.startswith("torch_shard")]
        for thread in left:
            thread.stop()
        assert len(left) == 2 and not any(thread.is_alive() for thread in left), left
    dist.barrier()
    model(torch.ones(1, 8)).sum().backward()
    dist.barrier()
    if rank == 1:
        tries_to_read(model)


def tries_to_read(model: nn.Module) -> None:
    try:
        read(model)
    except MissingRankError:
        sys.exit(MISSED)


def dies(victim: int) -> Callable[..., None]:
    """Return a way in which ranks 0 and 1 end, and rank 2 reads while, or after, `victim` dies at its end."""

    def way(rank: int, model: nn.Module, engine: Any, together: float) -> None:
        if rank == victim:
            timer = threading.Timer(2.0, os._exit, (DIED,))
            timer.daemon = True
            timer.start()
        if rank == 2 and rank == victim:
            with engine.gathered():
                time.sleep(60)
        elif rank == 2:
            time.sleep(4)
            tries_to_read(model)

    return way


WAYS: dict[str, Callable[..., None]] = {
    "late": late,
    "limit": limit,
    "fails": fails,
    "trains on": trains_on,
    "stops threads": stops_threads,
    "rank 0 dies": dies(0),
    "rank 1 dies": dies(1),
    "rank 2 dies": dies(2),
}


@pytest.mark.exhaustive
def test_a_rank_that_stays_for_another_says_so_after_a_while() -> None:
    codes, outputs = ranks("late", 2)
    assert codes == [0, 0], outputs  # rank 1 has got its values
    assert outputs[0].count("rank 0 is done, and stays until ranks [1] have ended, too") == 1, outputs
    assert "stays until" not in outputs[1]


@pytest.mark.exhaustive
def test_a_rank_stays_no_longer_than_the_limit() -> None:
    codes, outputs = ranks("limit", 2)
    assert codes[0] == 0 and "stays until ranks [1]" in outputs[0], (codes, outputs)


@on_ranks(2, group_timeout=100.0)
def test_the_limit_is_the_timeout_of_the_users_group_or_of_the_engine_if_that_is_longer() -> None:
    short = timedelta(seconds=50)
    for wait, timeout, expected in ((None, 30.0, 100.0), (short, 30.0, 50.0), (short, 60.0, 60.0)):
        group = None if wait is None else dist.new_group(timeout=wait)
        with mock.patch.object(process_groups, "stay_until_all_leave") as stay:
            torch_shard.shard(nn.Linear(4, 4), mesh=group, timeout=timeout)
        assert stay.call_args.args[2] == expected


def test_a_rank_that_ends_by_an_exception_serves_nobody() -> None:
    codes, outputs = ranks("fails", 2)
    assert codes == [MISSED, 1], outputs


@pytest.mark.exhaustive
def test_a_rank_that_others_wait_for_in_vain_ends_at_once() -> None:
    codes, outputs = ranks("trains on", 2)
    assert codes == [MISSED, 0], outputs  # long before rank 0 gives up by itself


@pytest.mark.exhaustive
def test_the_threads_of_a_service_can_be_stopped_as_test_suites_do() -> None:
    codes, outputs = ranks("stops threads", 2)
    assert codes == [0, MISSED], outputs  # which is what rank 1 gets where it reads alone once more


@pytest.mark.exhaustive
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_while_others_say_goodbye_holds_up_nobody(victim: int) -> None:
    codes, outputs = ranks(f"rank {victim} dies", 3)
    expected = [0, 0, MISSED]
    expected[victim] = DIED
    assert codes == expected, outputs  # and nobody has waited for the limit, which is half an hour


END_IN_A_COLLECTIVE = """
import os, sys
import torch
import torch.distributed as dist

killed = 0
for pair in range(10):
    children = []
    for rank in range(2):
        children.append(os.fork())
        if children[-1] == 0:
            import torch_shard

            dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/{pair}", rank=rank, world_size=2)
            for _ in range(3):
                dist.all_reduce(torch.ones(10), async_op=True)
            sys.exit()
    killed += sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
print(killed)
"""


@pytest.mark.exhaustive
def test_a_collective_that_ends_with_the_script_does_not_abort_it(tmp_path: Path) -> None:
    line = [sys.executable, "-c", END_IN_A_COLLECTIVE, str(tmp_path)]
    done = subprocess.run(line, env=variables(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 1, done.stderr  # of 20; without the pause at exit it is two in five


if __name__ == "__main__":
    script(sys.argv[1])
