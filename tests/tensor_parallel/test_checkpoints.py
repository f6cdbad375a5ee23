"""Checkpoints and state dicts of tensor-parallel parameters, to and from other meshes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from tests.support.ranks import ranks
from tests.tensor_parallel.harness import (
    DTYPE,
    EXACT,
    Model,
    Placed,
    batch,
    loss_of,
    mesh_of,
    optimizer_of,
    parallel,
    same,
    trained,
)
from torch_shard import shard
from torch_shard.errors import ShardError, StateDictError


def _as_mesh(form):
    """A model on 4 ranks, and its engine."""
    if form == "full_shard":
        model = Model(seed=7)
        return model, shard(model)
    mesh = mesh_of(*map(int, form.split("x")))
    model = parallel(mesh, seed=7)
    return model, shard(model, mesh=mesh["dp"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("source", "target"), [("2x2", "full_shard"), ("full_shard", "2x2"), ("2x2", "1x4"), ("1x4", "2x2")]
)
@ranks(4)
def test_checkpoints_load_on_other_meshes(source, target, tmp_path):
    """Sharded and full ones, with optimizer state; trained on afterwards, the numbers are the plain model's."""
    oracle = Model(seed=7)
    plain = optimizer_of(oracle)
    model, engine = _as_mesh(source)
    optimizer = optimizer_of(model)
    for step in range(2):
        for m, o in ((model, optimizer), (oracle, plain)):
            loss_of(m, batch(0, step)).backward()
            o.step()
            o.zero_grad()
    engine.save(tmp_path / "sharded", optimizer, extra={"step": 2})
    engine.save_full(tmp_path / "full.pt", optimizer)
    named = engine.optim_state_dict(optimizer, rank0_only=False)
    whole = engine.state_dict(rank0_only=False)
    for name, p in oracle.named_parameters():
        torch.testing.assert_close(named["state"][name]["exp_avg"], plain.state[p]["exp_avg"], **EXACT)
        torch.testing.assert_close(whole[name], p.detach(), **EXACT)
    dist.barrier()
    saved = torch.load(tmp_path / "full.pt", weights_only=True)
    Model().load_state_dict(saved["model"])
    for way in ("sharded", "full.pt", "dicts"):
        other, into = _as_mesh(target)
        stepped = optimizer_of(other)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        if way == "dicts":
            into.load_state_dict(whole)
            into.load_optim_state_dict(stepped, named)
        else:
            assert into.load(tmp_path / way, stepped) == ({"step": 2} if way == "sharded" else None)
        same(other, oracle)
        twin = copy.deepcopy(oracle)
        its = optimizer_of(twin)
        its.load_state_dict(copy.deepcopy(plain.state_dict()))
        for m, o in ((other, stepped), (twin, its)):
            loss_of(m, batch(0, 5)).backward()
            o.step()
        same(other, twin)
        into.close()


@ranks(4)
def test_a_checkpoint_has_every_element_once(tmp_path):
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    shard(model, mesh=mesh["dp"]).save(tmp_path / "step-1")
    found = dcp.FileSystemReader(tmp_path / "step-1").read_metadata()
    for name, p in model.named_parameters():
        entry = found.state_dict_metadata[f"model.{name}"]
        assert entry.size == p.shape
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == p.numel()
    assert len(found.storage_data) == sum(len(e.chunks) for e in found.state_dict_metadata.values())


@pytest.mark.exhaustive
@ranks(4)
def test_checkpoints_of_plain_tensor_parallelism_load_and_the_other_way_round(tmp_path):
    """As torch.distributed.checkpoint writes and reads them."""
    mesh = mesh_of(2, 2)
    plain, oracle = parallel(mesh, seed=3), Model(seed=3)
    dcp.save({"model": plain.state_dict()}, checkpoint_id=tmp_path / "dcp")
    model = parallel(mesh)
    engine = shard(model, mesh=mesh["dp"])
    engine.load(tmp_path / "dcp")
    same(model, oracle)
    engine.save(tmp_path / "ours")
    dist.barrier()
    other = parallel(mesh)
    into = {"model": other.state_dict()}
    dcp.load(into, checkpoint_id=tmp_path / "ours")
    other.load_state_dict(into["model"])
    for p, q in zip(other.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, q)


@pytest.mark.exhaustive
@ranks(4)
def test_sharded_state_dicts():
    mesh = mesh_of(2, 2)
    engine, model, oracle, _ = trained(mesh)
    sharded = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in engine.state_dict(form="sharded").items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine.load_state_dict(sharded)
    same(model, oracle)
    model.load_state_dict(oracle.state_dict())  # whole tensors, by torch's own
    same(model, oracle)
    given, oracle = parallel(mesh, seed=3), Model(seed=3)
    engine.load_state_dict(given.state_dict())  # of plain tensor parallelism
    same(model, oracle)
    given = parallelize_module(Model(), mesh["tp"], {"blocks.*.up": RowwiseParallel()})
    with pytest.raises(StateDictError, match=r"nothing was loaded.*\n.*blocks\.0\.up\.weight was given a DTensor"):
        engine.load_state_dict(given.state_dict())
    same(model, oracle)


def elsewhere(mesh, how, value=7.0):
    """A DTensor of the shape of a block's `up.weight`, which is cut in dimension 0 over mesh["tp"]."""
    whole = torch.full((12, 6), value, dtype=DTYPE)
    return distribute_tensor(whole, *{"mesh": (mesh["dp"], [Shard(0)]), "dim": (mesh["tp"], [Shard(1)])}[how])


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["mesh", "dim"])
@ranks(4)
def test_dtensors_of_another_distribution_are_refused_on_all_ranks(how):
    """Some ranks have the same box of both distributions."""
    mesh = mesh_of(2, 2)
    engine, model, oracle, optimizers = trained(mesh)
    named = engine.optim_state_dict(optimizers[0], rank0_only=False)
    fits = copy.deepcopy(named)
    fits["state"]["blocks.0.up.weight"]["exp_avg"] = distribute_tensor(
        fits["state"]["blocks.0.up.weight"]["exp_avg"], mesh["tp"], [Shard(0)]
    )
    engine.load_optim_state_dict(optimizers[0], fits)
    apart = copy.deepcopy(named)
    for entry in ("exp_avg", "exp_avg_sq"):
        apart["state"]["blocks.0.up.weight"][entry] = elsewhere(mesh, how)
    both = (
        r"nothing was loaded.*\n.*blocks\.0\.up\.weight: exp_avg was given a DTensor"
        r".*\n.*blocks\.0\.up\.weight: exp_avg_sq was given a DTensor"
    )
    with pytest.raises(StateDictError, match=both):
        engine.load_optim_state_dict(optimizers[0], apart)
    weight = model.blocks[0].up.weight
    with pytest.raises(ShardError, match=r"blocks\.0\.up\.weight was given a DTensor"), torch.no_grad():
        weight.copy_(elsewhere(mesh, how))
    with pytest.raises(StateDictError, match=r"nothing was loaded.*\n.*blocks\.0\.up\.weight was given a DTensor"):
        engine.load_state_dict({"blocks.0.up.weight": elsewhere(mesh, how)}, strict=False)
    same(model, oracle)
    after = engine.optim_state_dict(optimizers[0], rank0_only=False)
    for name, entries in named["state"].items():
        assert all(torch.equal(after["state"][name][key], value) for key, value in entries.items())


@ranks(4)
def test_state_of_a_matrix_optimizer_loads_from_whole_dtensors():
    """State by name, without a step in between; what is no DTensor that every rank has all of is refused."""
    mesh = mesh_of(2, 2)
    model = Placed(mesh["tp"])
    engine = shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adafactor(model.matrices(), lr=0.1)
    model(torch.ones(2, 4, 6, dtype=DTYPE)).square().sum().backward()
    optimizer.step()
    named = engine.optim_state_dict(optimizer, rank0_only=False)
    whole, cut = copy.deepcopy(named), copy.deepcopy(named)
    rows = named["state"]["after"]["row_var"]
    whole["state"]["after"]["row_var"] = distribute_tensor(rows, mesh["tp"], [Replicate()])
    cut["state"]["after"]["row_var"] = distribute_tensor(rows, mesh["tp"], [Shard(0)])
    with pytest.raises(StateDictError, match=r"nothing was loaded.*\n.*after: row_var was given a DTensor"):
        engine.load_optim_state_dict(optimizer, cut)
    engine.load_optim_state_dict(optimizer, whole)
    again = engine.optim_state_dict(optimizer, rank0_only=False)
    for name, entries in named["state"].items():
        for key, value in entries.items():
            assert type(again["state"][name][key]) is torch.Tensor
            assert torch.equal(again["state"][name][key], value)
