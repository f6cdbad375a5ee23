"""Page-locked host memory: torch sees it as such, and copies from and to it go on while the host does."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from torch_shard.errors import PinnedMemoryError
from torch_shard.offload import pinned
from torch_shard.offload.pinned import allocate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

MIB = 1 << 20
GPU = torch.device("cuda", 0)


def test_torch_sees_that_it_is_pinned():
    t = allocate(3 * MIB + 1, torch.float32, pin=True, device=GPU)
    assert t.is_pinned() and t[5:10].is_pinned() and t.view(torch.int32).is_pinned()
    assert not allocate(3 * MIB + 1, torch.float32, pin=False, device=GPU).is_pinned()


@pytest.mark.parametrize("to_host", [False, True])
def test_copies_do_not_block_the_host_and_are_exact(to_host):
    host = allocate(64 * MIB, torch.float32, pin=True, device=GPU)
    device = torch.empty(64 * MIB, device=GPU)
    source, target = (device, host) if to_host else (host, device)
    source.fill_(3.0)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of work in front of the copy
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    assert time.perf_counter() - began < 0.2
    torch.cuda.synchronize()
    assert target.min() == target.max() == 3.0


def test_memory_that_is_gone_can_be_locked_again():
    for _ in range(20):
        t = allocate(16 * MIB, torch.float32, pin=True, device=GPU)
        torch.empty(16 * MIB, device=GPU).copy_(t, non_blocking=True)
        del t
        gc.collect()


def test_a_lock_that_failed_leaves_no_error_behind():
    t = allocate(MIB, torch.float32, pin=True, device=GPU)
    with pytest.raises(PinnedMemoryError, match="already"):
        pinned._lock(t, t_memory(t), torch.cuda.cudart(), GPU)  # twice
    assert torch.ones(10, device=GPU).sum().item() == 10
    assert t.is_pinned()


class t_memory:
    """Stands for the memory of a tensor that is locked already."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def madvise(self, advice: int) -> None:
        pass
