"""What tensor parallelism refuses, before anything has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from tests.support.run_python import run_python
from tests.tensor_parallel.harness import DTYPE, Model, batch, loss_of, mesh_of, parallel
from torch_shard import shard
from torch_shard.errors import SetupError, ShardError


@ranks(4)
def test_meshes_that_don_t_fit_are_refused_by_the_parameters_name():
    mesh = mesh_of(2, 2)
    with pytest.raises(SetupError, match=r"embed\.weight is a DTensor.*pass the other dimension"):
        shard(parallel(mesh))
    with pytest.raises(SetupError, match=r"embed\.weight is a DTensor.*pass the other dimension"):
        shard(parallel(mesh), mesh=mesh.get_group("dp"))
    with pytest.raises(SetupError, match=r"embed\.weight is a DTensor over ranks \[.*only this rank in common"):
        shard(parallel(mesh), mesh=mesh["tp"])
    with pytest.raises(SetupError, match=r"mesh has 2 dimensions"):
        shard(parallel(mesh), mesh=mesh)
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    with pytest.raises(SetupError, match=r"only this rank in common"):
        shard(parallel(mesh), mesh=flat)
    model = Model()
    parallelize_module(model.blocks[0], mesh["tp"], {"up": ColwiseParallel()})
    parallelize_module(model.blocks[1], mesh["dp"], {"up": ColwiseParallel()})
    with pytest.raises(SetupError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight .* different meshes"):
        shard(model, mesh=mesh["dp"])


@ranks(4)
def test_parameters_that_fully_shard_has_sharded_are_refused():
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(2, 2)
    model = Model()
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(SetupError, match=r"parameter gain is a DTensor over ranks .*fully_shard"):
        shard(model, mesh=mesh["dp"])
    both = parallel(mesh)
    fully_shard(both, mesh=mesh["dp"])
    with pytest.raises(SetupError, match=r"is a DTensor over ranks .*fully_shard"):
        shard(both, mesh=mesh["dp"])


@ranks(4)
def test_other_placements_and_meta_are_refused_before_anything_changes():
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    partial = DTensor.from_local(torch.zeros(6, dtype=DTYPE), mesh["tp"], [Partial()])
    model.blocks[1].down.bias = nn.Parameter(partial)
    with pytest.raises(SetupError, match=r"blocks\.1\.down\.bias is a DTensor with placement"):
        shard(model, mesh=mesh["dp"])
    assert type(model.blocks[0].up.weight) is DTensor
    half = parallel(mesh)
    half.blocks[0].up.to("meta")
    with pytest.raises(SetupError, match=r"blocks\.0\.up\.weight is a DTensor on the meta device, and others"):
        shard(half, mesh=mesh["dp"])
    with torch.device("meta"):
        empty = parallel(mesh)
    with pytest.raises(SetupError, match=r"is a DTensor on the meta device, and with init_fn"):
        shard(empty, mesh=mesh["dp"], init_fn=lambda module: None)


@ranks(4)
def test_what_is_not_supported_says_so():
    mesh = mesh_of(2, 1, 2, names=("copies", "dp", "tp"))
    hybrid = {"strategy": "hybrid_shard", "mesh_dims": ("copies", "dp")}
    engine = shard(parallel(mesh), mesh=mesh, **hybrid)  # a copy on each rank after all
    assert runtime_of(engine).collectives.topology.replicas == 2
    model = parallel(mesh)
    shard(model, mesh=mesh["copies"])
    with pytest.raises(ShardError, match=r"autograd\.grad with respect to embed\.weight"):
        torch.autograd.grad(loss_of(model, batch(0, 0)), [model.embed.weight])
    norm = parallel(mesh)
    norm.register_buffer("scale", distribute_tensor(torch.ones(2), mesh["tp"], [Replicate()]))
    with pytest.raises(SetupError, match="buffer scale is a DTensor"):
        shard(norm, mesh=mesh["copies"])
    with pytest.raises(SetupError, match=r"ignored parameter embed\.weight is a DTensor"):
        shard(parallel(mesh), mesh=mesh["copies"], ignore=["embed.*"])


@pytest.mark.exhaustive
def test_hybrid_strategies_are_refused():
    code = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch_shard import shard
from torch_shard.errors import ConfigError
dist.init_process_group("fake", rank=0, world_size=8)
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copies", "dp", "tp"))
model = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
try:
    shard(model, mesh=mesh, mesh_dims=("copies", "dp"), strategy="hybrid_shard")
except ConfigError as error:
    print(error)
"""
    assert "strategy: 'hybrid_shard' of parameters that are parallelized" in run_python("-c", code).stdout
