"""With tensor parallelism a read by one rank alone is an error that says so, and no hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.ranks import run
from tests.tensor_parallel.harness import backward, batch, pair_of
from torch_shard.errors import ShardError

LIMIT = 8.0
READS: dict[str, Callable[[nn.Module, torch_shard.Engine], Any]] = {
    "a forward": lambda model, engine: model(batch(0, 0)),
    "a norm": lambda model, engine: model.embed.weight.norm(),
    "a norm of a plain parameter": lambda model, engine: model.head.weight.norm(),
    "a full tensor": lambda model, engine: model.blocks[0].up.weight.full_tensor(),
    "a state dict": lambda model, engine: engine.state_dict(form="full"),
    "a file": lambda model, engine: torch.save(model.state_dict(), "/dev/null"),
}


def reads(rank: int, world_size: int, read: str, where: str) -> str:
    mesh, model, _, engine = pair_of(timeout=LIMIT, alone_after=0.1)
    backward(model, mesh, 0)
    begin, found = time.monotonic(), ""
    try:
        if rank == 0:
            with torch.no_grad():
                READS[read](model, engine)
        elif where == "in the next step":
            backward(model, mesh, 1)
        else:
            time.sleep(3 * LIMIT)
    except ShardError as error:
        assert time.monotonic() - begin < 5 * LIMIT
        found = f"{type(error).__name__}: {error}"
    if found.startswith("ShardPicklingError") and where == "in the next step":
        backward(model, mesh, 1)  # with which nothing has interfered
    assert engine.statistics().lone_reads == 0
    return found


@pytest.mark.parametrize(
    ("read", "where"),
    [
        ("a full tensor", "in the next step"),
        *exhaustive(
            *((read, "in the next step") for read in READS if read != "a full tensor"), ("a full tensor", "away")
        ),
    ],
)
def test_a_read_of_one_rank_alone_is_an_error(read: str, where: str) -> None:
    reader, *others = run(4, reads, read, where, fresh=True, timeout=60)
    if read == "a file":
        assert reader.startswith("ShardPicklingError") and "called on all ranks" in reader, reader
    elif where == "away":
        assert reader.startswith("MissingRankError") and "call it on every rank" in reader, reader
    else:
        assert reader.startswith(("DivergenceError", "MissingRankError")) and "every rank" in reader.lower(), reader
        assert all(other.startswith(("DivergenceError", "MissingRankError")) for other in others), others
