"""Backwards that end with an exception: the next step is that of a model to which nothing has happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat.harness import MLP, Pair, batch, plain_backward, same_params
from tests.support.inside import runtime_of
from tests.support.ranks import ranks

_ENGINE = torch.autograd.Variable._execution_engine


class KeepsGraphTasks:
    """Autograd's engine, except that callbacks of graph tasks live on, as with a device whose thread is late to drop a task."""

    def __init__(self) -> None:
        self.kept: list[Callable[[], None]] = []

    def queue_callback(self, callback: Callable[[], None]) -> None:
        self.kept.append(callback)
        _ENGINE.queue_callback(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(_ENGINE, name)


@ranks(2)
def test_a_graph_task_that_is_dropped_in_the_next_step_changes_nothing_there(rank, world_size, monkeypatch):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    late = KeepsGraphTasks()

    def fail(_: torch.Tensor) -> None:
        raise KeyError("half-way")

    handle = pair.model.blocks[1].up.weight.register_hook(fail)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.Variable, "_execution_engine", late)
        with pytest.raises(KeyError):
            plain_backward(pair.model, batch(rank, 1))
    handle.remove()
    assert late.kept
    handle = pair.model.blocks[1].up.weight.register_hook(lambda _: late.kept.clear())
    pair.step(plain_backward, batch(rank, 2))
    handle.remove()
    assert not late.kept
    pair.step(plain_backward, batch(rank, 3))
    same_params(pair.model, pair.plain)


@ranks(2)
def test_the_buffers_of_its_reductions_are_let_go_once_these_have_ended(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    channel = runtime_of(pair.engine).collectives.reduce_channel
    buffers = channel.groups.buffers

    def fail(_: torch.Tensor) -> None:
        raise KeyError("half-way")

    handles = [pair.model.blocks[1].up.weight.register_hook(fail)]
    if rank == 1:  # the other one fails while its first reductions are under way
        handles.append(pair.model.head.weight.register_hook(lambda _: time.sleep(0.5)))
    begun = channel.issued
    with pytest.raises(KeyError):
        plain_backward(pair.model, batch(rank, 1))
    assert channel.issued > begun
    for handle in handles:
        handle.remove()
    left = list(buffers)  # on rank 0: nobody waits for them any more
    for work in left:
        work.wait()
    pair.step(plain_backward, batch(rank, 2))
    assert not buffers.keys() & set(left)
