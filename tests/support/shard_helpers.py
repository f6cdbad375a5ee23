"""ShardTensors without an engine, for the tests of ShardTensor itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from torch_shard.comm.watchdog import Watchdog
from torch_shard.layout.flat_layout import FlatLayout, ParamMeta
from torch_shard.shard_tensor.spec import ShardSpec
from torch_shard.shard_tensor.tensor import ShardTensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass
class GroupComm:
    """The default process group as a ScalarComm; counts its calls."""

    size: int
    rank: int
    calls: int = field(default=0, compare=False)
    bytes_sent: int = field(default=0, compare=False)
    channel = unknown_step = None

    @property
    def world_rank(self):
        return self.rank

    @property
    def watchdog(self):
        return Watchdog(self.rank, list(range(self.size)), 30.0, "")

    @property
    def data_parallel(self):
        return self

    def all_reduce(self, tensor, op, what):
        self.calls += 1
        dist.all_reduce(tensor, op=_OPS[op])
        return tensor

    def all_gather(self, tensor, what):
        self.calls += 1
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    def broadcast(self, tensor, source, what):
        self.calls += 1
        dist.broadcast(tensor, source)


SHAPES = {
    "matrix": (5, 7),
    "vector": (11,),
    "scalar": (),
    "one": (1,),
    "none": (0, 3),
    "cube": (3, 4, 5),
    "image": (4, 3, 3, 3),  # channels_last
}


def values(dtype=torch.float32, seed=0):
    """The same plain tensors on every rank."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in SHAPES.items():
        value = torch.randn(shape, generator=generator).to(dtype)
        found[name] = value.to(memory_format=torch.channels_last) if name == "image" else value
    return found


def sharded(plain, rank, world_size, comm=None):
    """One flat layout over the given plain tensors; returns their ShardTensors by name."""
    comm = comm or GroupComm(world_size, rank)
    metas = [ParamMeta(name, tuple(t.shape), t.stride()) for name, t in plain.items()]
    itemsize = next(iter(plain.values())).element_size()
    layout = FlatLayout.build(metas, itemsize, world_size)
    return {
        name: ShardTensor.from_full(t, ShardSpec(layout, i, rank, comm)) for i, (name, t) in enumerate(plain.items())
    }


def same(result, expected, **tolerance):
    """Assert that a result equals the plain one: shape, dtype, and every element."""
    if isinstance(result, ShardTensor):
        assert result.shape == expected.shape
        result = result.full_tensor()
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    torch.testing.assert_close(result, expected, equal_nan=True, **tolerance)


@st.composite
def placed(draw):
    """A dense tensor of any strides behind another parameter, its layout, and a number of ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8]))
    world_size = draw(st.one_of(st.integers(1, 5), st.sampled_from([64, 4096])))
    full = torch.arange(math.prod(shape)).reshape([shape[d] for d in order]).to(dtype)
    full = full.permute(sorted(range(len(order)), key=order.__getitem__))
    metas = [ParamMeta("before", (draw(st.integers(0, 40)),), (1,)), ParamMeta("w", shape, full.stride())]
    return full, FlatLayout.build(metas, full.element_size(), world_size)


def join(locals_, full):
    """Return the full tensor of these shards, in the strides of `full`."""
    return torch.cat(locals_).as_strided(full.shape, full.stride())
