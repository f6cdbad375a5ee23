"""A model for tensor parallelism on 2 x 2 ranks, and its oracle: the same model, trained plainly with the mean of the gradients
of the data-parallel batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_shard import shard

EXACT = {"rtol": 1e-11, "atol": 1e-12}

DTYPE = torch.float64


class Block(nn.Module):
    def __init__(self, width=6, hidden=12):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=DTYPE)
        self.up = nn.Linear(width, hidden, dtype=DTYPE)
        self.down = nn.Linear(hidden, width, dtype=DTYPE)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    """Embedding, norms and layers for tensor and sequence parallelism; `head` and `gain` stay plain parameters."""

    def __init__(self, seed=0, width=6, hidden=12):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(16, width, dtype=DTYPE)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, 3, dtype=DTYPE)
        self.gain = nn.Parameter(torch.ones(3, dtype=DTYPE))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.gain * self.head(x)


PLAN = {
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.norm": SequenceParallel(),
    "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
    "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
    "head": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True),
}


def mesh_of(*shape, names=("dp", "tp")):
    # DTensor remembers meshes by what they look like; the groups of earlier tests are gone.
    _clear_sharding_prop_cache()
    _redistribute._gen_transform_infos.cache_clear()
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def parallel(mesh, seed=0, **sizes):
    return parallelize_module(Model(seed, **sizes), mesh["tp"], PLAN)


def batch(place, step):
    generator = torch.Generator().manual_seed(1000 * step + place)
    return torch.randint(0, 16, (3, 4), generator=generator)


def loss_of(model, tokens):
    return model(tokens).square().sum()


def pair_of(**options):
    """A mesh of 2 x 2 ranks, a model sharded over it, the oracle, and the engine."""
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    return mesh, model, oracle, shard(model, mesh=mesh["dp"], **options)


def backward(model, mesh, step):
    loss_of(model, batch(mesh["dp"].get_local_rank(), step)).backward()


def plain_backward(model, step, places=2):
    for place in range(places):
        (loss_of(model, batch(place, step)) / places).backward()


def both_backward(mesh, model, oracle, step):
    """A backward of both, of the model on this rank's batch and of the oracle on all."""
    backward(model, mesh, step)
    plain_backward(oracle, step, mesh["dp"].size())


def same(model, oracle, grads=False):
    for (name, p), (_, q) in zip(model.named_parameters(), oracle.named_parameters(), strict=True):
        mine, other = (p.grad, q.grad) if grads else (p, q.detach())
        torch.testing.assert_close(mine.full_tensor(), other, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def optimizer_of(model, kind="adamw"):
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def trained(mesh, steps=2, kind="adamw", **options):
    """A sharded and a plain model after some steps, with their optimizers."""
    model, oracle = parallel(mesh), Model()
    engine = shard(model, mesh=mesh["dp"], **options)
    optimizers = optimizer_of(model, kind), optimizer_of(oracle, kind)
    train(mesh, model, oracle, optimizers, range(steps))
    return engine, model, oracle, optimizers


def train(mesh, model, oracle, optimizers, steps):
    for step in steps:
        both_backward(mesh, model, oracle, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class Placed(nn.Module):
    """Two matrices that every tensor-parallel rank has all of, as DTensors where there is a `mesh`."""

    def __init__(self, mesh=None):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 12, dtype=DTYPE), nn.Linear(12, 6, dtype=DTYPE)
        self.before, self.after = (nn.Parameter(torch.randn(4, 6, dtype=DTYPE)) for _ in range(2))
        if mesh is not None:
            parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            for name in ("before", "after"):
                whole = distribute_tensor(getattr(self, name).detach(), mesh, [Replicate()])
                setattr(self, name, nn.Parameter(whole))

    def forward(self, x):
        before, after = (p.to_local() if isinstance(p, DTensor) else p for p in (self.before, self.after))
        return self.down(self.up(x + before).relu()) + after

    def matrices(self):
        return [self.before, self.after]
