"""Host memory that is page-locked for copies: what a machine without a GPU can show. tests/gpu/test_pinned.py has the rest."""

from __future__ import annotations

import gc
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from torch_shard.errors import HostMemoryError, PinnedMemoryError
from torch_shard.offload import pinned
from torch_shard.offload.pinned import allocate, can_pin

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")


class Runtime:
    """What is called of the CUDA runtime, with a record of it."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked, self.calls = status, {}, []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("lock")
        if self.status == 0:
            self.locked[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append("unlock")
        # It must still be mapped.
        assert any(line.startswith(f"{address:08x}-") for line in Path("/proc/self/maps").read_text().splitlines())
        del self.locked[address]
        return 0

    def cudaGetErrorString(self, status: int) -> str:
        return "out of memory"


def locked(nbytes: int, runtime: Runtime) -> torch.Tensor:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    pinned._lock(tensor, memory, runtime, GPU)
    return tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
@pytest.mark.parametrize("numel", [0, 1, 1000, 3 * MIB + 1])
def test_it_is_zeros_from_a_page_on(numel, dtype):
    t = allocate(numel, dtype, pin=False, device=CPU)
    assert (t.shape, t.dtype, t.device, t.is_contiguous()) == ((numel,), dtype, CPU, True)
    assert t.untyped_storage().nbytes() == numel * dtype.itemsize  # nothing rounded up
    assert numel == 0 or t.data_ptr() % mmap.PAGESIZE == 0
    assert not t.to(torch.float32).any()
    t.fill_(2)
    assert t.to(torch.float32).sum() == 2 * numel


def test_without_a_gpu_pin_is_without_effect():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert not can_pin(GPU) and not can_pin(CPU)
    assert not allocate(10, torch.float32, pin=True, device=GPU).is_pinned()


@pytest.mark.exhaustive
@needs_linux
def test_memory_is_locked_whole_and_until_the_last_view_is_gone():
    runtime = Runtime()
    t = locked(3 * MIB, runtime)
    assert runtime.locked == {t.data_ptr(): 3 * MIB}
    view = t.view(torch.float32)[7:9]
    other = torch.empty(0).set_(view.untyped_storage())
    del t, view
    gc.collect()
    assert runtime.calls == ["lock"] and other.untyped_storage().nbytes() == 3 * MIB
    del other
    gc.collect()
    assert runtime.calls == ["lock", "unlock"] and not runtime.locked


@needs_linux
def test_memory_that_can_not_be_locked_is_an_error_with_the_remedy():
    runtime = Runtime(status=2)
    with pytest.raises(PinnedMemoryError) as raised:
        locked(3 * MIB, runtime)
    for part in ("3.00 MiB", "cuda:0", "out of memory", "error 2", "Offload(pin_memory=False)"):
        assert part in str(raised.value)
    assert isinstance(raised.value, HostMemoryError)
    del raised
    gc.collect()
    assert runtime.calls == ["lock"]  # nothing to unlock


@needs_linux
def test_a_forked_child_does_not_have_locked_memory_and_unlocks_nothing():
    runtime = Runtime()
    t = locked(MIB, runtime)
    address = t.data_ptr()
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            there = any(line.startswith(f"{address:08x}-") for line in Path("/proc/self/maps").read_text().splitlines())
            del t
            gc.collect()
            os.write(writing, f"{there} {runtime.calls}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    text = os.read(reading, 4096).decode()
    os.close(reading)
    assert text == "False ['lock']"
    assert runtime.locked == {address: MIB}
