"""Ranks that die while one rank reads alone: errors within the limit, nobody hangs, nobody goes on with half a model."""

from __future__ import annotations

import gc
import io
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import exhaustive, quick
from tests.support.ranks import run
from tests.support.run_python import run_python
from torch_shard.comm.one_sided.partners import Reading
from torch_shard.comm.one_sided.service import Service
from torch_shard.errors import ShardError

LIMIT = 3.0


def made(limit: float = LIMIT) -> tuple[nn.Module, torch_shard.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return model, torch_shard.shard(model, units=["0", "1", "2", "3"], timeout=limit, alone_after=0.1)


def read(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.ones(1, 8))


def step(model: nn.Module) -> None:
    model(torch.ones(1, 8)).sum().backward()


def outcome(work: Any, *args: Any) -> str:
    """Return the error that `work` ends with, which comes within the limit; "" if it ends without."""
    begin = time.monotonic()
    try:
        work(*args)
    except ShardError as error:
        return type(error).__name__
    finally:
        assert time.monotonic() < begin + 3 * LIMIT + 5
    return ""


READS: dict[str, Callable[[nn.Module, torch_shard.Engine], Any]] = {
    "a forward": lambda model, engine: read(model),
    "a state dict": lambda model, engine: engine.state_dict(form="full"),
    "a file": lambda model, engine: torch.save(model.state_dict(), io.BytesIO()),
}
VICTIMS = {"the reader": (0,), "a server": (1,), "both at once": (0, 1)}


def body(rank: int, world_size: int, who: str, phase: str, what: str) -> tuple[str, str]:
    """Return the errors that a survivor gets, at first and when it goes on all the same."""
    model, engine = made()
    step(model)
    processes: list[int] = [0] * world_size
    dist.all_gather_object(processes, os.getpid())
    if phase != "between backward and step":
        model.zero_grad()

    def dies(*_: Any) -> None:
        if who == "both at once":
            os.kill(processes[1], signal.SIGKILL)
        os._exit(3)

    admitted, admit = threading.Event(), Service._admit

    def noted(*args: Any) -> None:
        admit(*args)
        admitted.set()

    Service._admit = noted  # type: ignore[method-assign]
    if rank == VICTIMS[who][0]:
        if phase == "before it":
            dies()
        elif phase == "as it is asked":
            Service._answer = Reading.fill = dies  # type: ignore[assignment,method-assign]
        else:
            of = Service._send_shard if rank == 1 else Reading._fill
            left = [2]

            def counted(*args: Any) -> Any:
                left[0] -= 1
                return of(*args) if left[0] else dies()

            setattr(*((Service, "_send_shard") if rank == 1 else (Reading, "_fill")), counted)
    if rank == 0:
        return outcome(READS[what], model, engine), outcome(READS[what], model, engine)
    if rank in VICTIMS[who]:
        time.sleep(60)  # it computes until it dies
    if phase == "between backward and step":
        assert admitted.wait(20)
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # which waits for nobody who is gone
    return outcome(step, model), outcome(step, model)


PHASES = ["before it", "as it is asked", "within it", "between backward and step"]


@pytest.mark.parametrize(
    ("who", "phase", "what"),
    [
        *(("the reader", phase, "a forward") for phase in PHASES),
        *(("a server", phase, "a forward") for phase in PHASES[:3]),
        ("both at once", "within it", "a forward"),
        *exhaustive(*(("both at once", phase, "a forward") for phase in PHASES if phase != "within it")),
        ("a server", "within it", "a state dict"),
        *exhaustive(*((who, "within it", "a state dict") for who in ("the reader", "both at once"))),
        *exhaustive(*((who, "within it", "a file") for who in VICTIMS)),
    ],
)
def test_a_rank_dies_in_a_lone_read(who: str, phase: str, what: str) -> None:
    found = run(3, body, who, phase, what, may_die=VICTIMS[who], timeout=50)
    for rank, errors in enumerate(found):
        if rank in VICTIMS[who]:
            assert errors is None, found
        else:
            assert set(errors) <= {"MissingRankError", "DivergenceError"}, found


def destroyed(rank: int, world_size: int) -> float:
    model, _ = made()
    together = read(model).sum().item()
    dist.barrier()
    dist.destroy_process_group()
    if rank > 0:
        time.sleep(4)  # with the model
        return together
    return read(model).sum().item()


def test_a_rank_reads_after_all_have_destroyed_the_process_group() -> None:
    first, *others = run(3, destroyed, fresh=True, timeout=40)
    assert all(value == first for value in others)


def left_behind(rank: int, world_size: int) -> tuple[float, float]:
    """Train in a function, and read behind it: as a script's main() ends on all ranks but one."""

    def main() -> tuple[nn.Module, torch.optim.Optimizer, float]:
        model, _ = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model)
        optimizer.step()
        return model, optimizer, read(model).sum().item()

    kept = main() if rank == 0 else (None, None, main()[2])
    gc.collect()
    if rank > 0:
        time.sleep(4)
        return kept[2], 0.0
    model, optimizer, _ = kept
    time.sleep(1)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()))["state"]
    return read(model).sum().item(), sum(state["momentum_buffer"].sum().item() for state in saved.values())


def test_a_rank_reads_model_and_optimizer_that_the_others_have_dropped() -> None:
    (first, momentum), *others = run(3, left_behind, fresh=True, timeout=40)
    assert momentum != 0 and all(value == first for value, _ in others)


def dropped(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    model, engine = made()
    flat = engine.units[0].flats[0]
    memory, module = weakref.ref(flat.memory), weakref.ref(model[0])
    step(model)
    del engine, model, flat
    gc.collect()
    left = memory() is not None, module() is not None
    other, _ = made()  # for which all ranks meet
    return *left, memory() is not None and other is not None


def test_of_a_dropped_model_the_shards_are_kept_and_only_until_the_ranks_meet() -> None:
    assert run(2, dropped, timeout=40) == 2 * [(True, False, False)]


LEAVES = """
import os, sys
import torch, torch_shard
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
engine = torch_shard.shard(model, timeout=200.0)
model(torch.ones(2, 4)).sum().backward()
if dist.get_rank() == 1:
    sys.exit(3)
try:
    model(torch.ones(2, 4)).sum().backward()
except torch_shard.errors.MissingRankError:
    print("ENDED", flush=True)
    os._exit(4)
"""


@pytest.mark.exhaustive
def test_a_rank_that_the_others_train_with_does_not_stay_at_its_end(tmp_path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    begin = time.monotonic()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "leaves.py")
    done = run_python(*torchrun, folder=tmp_path, expected=1, timeout=150)
    assert "ENDED" in done.stdout and time.monotonic() - begin < 100


def test_a_lone_edit_does_not_reach_the_partners_and_is_an_error() -> None:
    editor, partner = run(2, edits, timeout=40)
    assert editor == "DivergenceError"  # in its read
    assert partner in ("DivergenceError", "MissingRankError")  # in its step, to which the editor does not come


def test_the_error_comes_at_once_where_the_partner_waits_for_the_editor() -> None:
    assert run(2, edits, 600.0, timeout=40) == ["DivergenceError", "DivergenceError"]


def edits(rank: int, world_size: int, limit: float = LIMIT) -> str:
    model, _ = made(limit)
    if rank == 0:
        with torch.no_grad():
            model[0].weight.mul_(2)
        found = outcome(read, model)
        if found != "DivergenceError" or limit == LIMIT:
            return found
    return outcome(step, model)


EDITS = {
    "in place": lambda model: model[0].weight.mul_(2),
    "copied in": lambda model: model[1].weight.data.copy_(torch.zeros(8, 8)),
    "by foreach": lambda model: torch._foreach_copy_(
        [p.data for p in model.parameters()], [torch.zeros(p.shape) for p in model.parameters()]
    ),
    "by an optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
}


def edits_unread(rank: int, world_size: int, edit: str) -> tuple[str, str, str]:
    model, engine = made(60.0)
    step(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    optimizer.zero_grad()
    start = {key: value.clone() for key, value in engine.state_dict(form="full", rank0_only=False).items()}
    if rank == 0:
        with torch.no_grad():
            if edit == "by an optimizer":
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            EDITS[edit](model)
    first, second = outcome(step, model), outcome(step, model)
    engine.load_state_dict(start)  # after which all ranks have one model again
    return first, second, outcome(step, model)


@pytest.mark.parametrize("edit", quick(EDITS, ["by foreach"]))
def test_no_rank_trains_on_with_what_another_one_has_edited_alone(edit: str) -> None:
    assert run(2, edits_unread, edit, timeout=60) == 2 * [("DivergenceError", "DivergenceError", "")]
