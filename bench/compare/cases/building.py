"""How a model comes to be: without memory, from a file, with parameters added later, with other values on other ranks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compare.case import Job, case
from compare.engines import NotApplicable
from tests.support.models import MLP


@case(
    "a model built on meta, its values drawn by `reset_parameters` from the same seed",
    test="test_a_model_built_on_meta_has_the_random_values_of_a_plain_one",
    note="`to_empty()` and `reset_parameters()` of all layers before DDP and after `fully_shard`; FSDP1 and this engine call "
    "them themselves; `deepspeed.zero.Init` for ZeRO-3.",
)
def on_meta(job: Job) -> None:
    model, optimizer = job.create(MLP)
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Memory:
    """Sees, every millisecond, how much memory this process has of its own; pages of files are not counted.

    Attributes:
        peak: the most since the beginning, in bytes, less what there was then.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        gc.collect()
        # Memory that has been freed, but not given back to the system, would be taken again, and not be seen.
        ctypes.CDLL(None).malloc_trim(0)
        self._before = self._now()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, self._now() - self._before)

    @staticmethod
    def _now() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024


def _wide() -> MLP:
    return MLP(width=384, blocks=8)


def _same_on_all(text: str) -> str:
    """Return rank 0's text."""
    found = [text]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]


@case(
    "a model loaded from a file, with memory for one and a half models on each rank",
    test="setup/test_from_files.py",
    note="A rank may allocate one and a half times what all parameters take, 54 MiB in float64, until the model is ready to "
    "train; beyond that the script raises a MemoryError. `load_state_dict` of a mapped file before DDP, FSDP1's `param_init_fn`, "
    "`set_model_state_dict` after `fully_shard`, `deepspeed.zero.Init` and `GatheredParameters`, `torch_shard.from_files`.",
)
def within_memory(job: Job) -> None:
    limited = dist.is_initialized()
    if limited and not Path("/proc/self/status").exists():
        raise NotApplicable("this system does not say how much memory a process has")
    with torch.device("meta"):
        nbytes = sum(p.numel() for p in _wide().parameters()) * torch.get_default_dtype().itemsize
    limit = 1.5 * nbytes  # peers differ by a quarter of the model from run to run
    folder = _same_on_all(tempfile.mkdtemp(prefix="compare-") if job.rank == 0 else "")
    try:
        file = os.path.join(folder, "model.pt")
        if job.rank == 0:
            torch.manual_seed(8)
            torch.save(_wide().state_dict(), file)
        _same_on_all("written")
        watch: contextlib.AbstractContextManager[Memory | None] = Memory() if limited else contextlib.nullcontext()
        with watch as memory:
            model, optimizer = job.create(_wide, file=file)
        for x in job.batches(2):
            job.train(model, optimizer, x)
    finally:
        if job.rank == 0:
            shutil.rmtree(folder)
    # After the steps, so that no rank waits in a collective for one that has ended.
    if memory is not None and memory.peak > limit:
        raise MemoryError(f"{memory.peak / 2**20:.1f} MiB were allocated, and a rank has {limit / 2**20:.1f}")


class Late(nn.Module):
    """A linear layer, and what was registered beside it later."""

    late: nn.Parameter
    adapter: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.late + self.adapter(x)


@case(
    "parameters and layers registered after construction, before sharding",
    test="test_parameters_registered_after_construction_and_before_sharding",
)
def registered_late(job: Job) -> None:
    model = Late()
    model.register_parameter("late", nn.Parameter(torch.randn(3)))
    model.add_module("adapter", nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False)))
    model, optimizer = job.prepare(model, blocks=(nn.Linear,))
    for x in job.batches(3):
        job.train(model, optimizer, x)


class Shifted(MLP):
    """Adds a random buffer to its output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.get_buffer("shift")


@case(
    "ranks that begin with different parameters and buffers",
    test="test_with_sync_module_states_all_ranks_start_from_rank_0s_values",
    note="The plain model begins with rank 0's. FSDP1 has `sync_module_states=True` for it, which the script does not set.",
)
def other_beginnings(job: Job) -> None:
    torch.manual_seed(job.rank)
    model, optimizer = job.prepare(Shifted())
    for x in job.batches(3):
        job.train(model, optimizer, x)
    job.see("buffers", [buffer.clone() for buffer in model.buffers()])
