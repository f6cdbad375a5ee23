"""Tensor-parallel parameters (DTensor) sharded on top, on a mesh of 2 x 2 ranks. The oracle is the same model, trained plainly
with the mean of the gradients of the data-parallel batches."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.ranks import ranks
from torch_shard import shard
from torch_shard.errors import ConfigError, NonFiniteError, SetupError, ShardError, StateDictError, UnitStateError

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


def backward(model, mesh, step):
    loss_of(model, batch(mesh["dp"].get_local_rank(), step)).backward()


def plain_backward(model, step, places=2):
    for place in range(places):
        (loss_of(model, batch(place, step)) / places).backward()


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
        backward(model, mesh, step)
        plain_backward(oracle, step, mesh["dp"].size())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


# -- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("full_shard", "sgd"),
        pytest.param("full_shard", "adamw", marks=pytest.mark.exhaustive),
        pytest.param("shard_grad_op", "sgd", marks=pytest.mark.exhaustive),
        pytest.param("shard_optim", "sgd", marks=pytest.mark.exhaustive),
        ("no_shard", "adamw"),
        pytest.param("no_shard", "sgd", marks=pytest.mark.exhaustive),
    ],
)
@ranks(4)
def test_training_gives_the_numbers_of_the_plain_model(strategy, kind):
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    before = dict(model.named_parameters())
    optimizers = optimizer_of(model, kind), optimizer_of(oracle, kind)  # built before sharding: it stays valid
    engine = shard(model, mesh=mesh["dp"], strategy=strategy)
    assert engine.world_size == 4 and engine.rank == dist.get_rank()
    assert all(p is before[name] for name, p in model.named_parameters())
    assert [p.shape for p in model.parameters()] == [p.shape for p in oracle.parameters()]
    same(model, oracle)
    for step in range(3):
        backward(model, mesh, step)
        plain_backward(oracle, step)
        same(model, oracle, grads=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        same(model, oracle)
    with torch.no_grad():
        torch.testing.assert_close(model(batch(0, 9)), oracle(batch(0, 9)), **EXACT)


@ranks(4)
def test_the_first_data_parallel_ranks_values_count(rank):
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh, seed=mesh["dp"].get_local_rank()), Model(seed=0)
    shard(model, mesh=mesh["dp"])
    same(model, oracle)
    apart = parallel(mesh, seed=mesh["dp"].get_local_rank())
    engine = shard(apart, mesh=mesh["dp"], sync_module_states=False)
    with engine.gathered():  # each rank has kept its slice
        whole = apart.blocks[0].up.weight.detach().to_local().clone()
    everyone = [torch.empty_like(whole) for _ in range(4)]
    dist.all_gather(everyone, whole)
    assert torch.equal(everyone[0], everyone[2]) and torch.equal(everyone[1], everyone[3])
    assert not torch.equal(everyone[0], everyone[1])


@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("no_shard", marks=pytest.mark.exhaustive)])
@ranks(4)
def test_parameters_on_meta_are_initialised_as_a_plain_models(strategy):
    mesh = mesh_of(2, 2)
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "1": SequenceParallel(),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 2))
    parallelize_module(model, mesh["tp"], plan)
    torch.manual_seed(5 + dist.get_rank())  # rank 0's counts
    shard(model, mesh=mesh["dp"], strategy=strategy)
    torch.manual_seed(5)
    oracle = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 2))
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q)


@pytest.mark.exhaustive
@ranks(4)
def test_a_communication_hook_reduces_over_the_data_parallel_ranks():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    engine = shard(model, mesh=mesh["dp"], single_communicator=True)
    assert dist.get_process_group_ranks(engine.shard_group) == dist.get_process_group_ranks(mesh.get_group("dp"))

    def hook(group, grad, output):
        parts = list(grad.chunk(2))
        for place, part in enumerate(parts):
            dist.reduce(part, group=group, group_dst=place)
        output.copy_(parts[dist.get_rank(group)] / 2)

    engine.register_comm_hook(mesh.get_group("dp"), hook)
    backward(model, mesh, 0)
    plain_backward(oracle, 0)
    same(model, oracle, grads=True)


@ranks(4)
def test_the_dimension_may_be_named_and_memory_is_a_quarter():
    mesh = mesh_of(2, 2)
    model = parallel(mesh, width=64, hidden=64)
    engine = shard(model, mesh=mesh, mesh_dims="dp")
    cut = sum(p.numel() for n, p in model.named_parameters() if any(k in n for k in ("embed", "up", "down.weight")))
    rest = sum(p.numel() for p in model.parameters()) - cut
    held = engine.memory_summary()["parameters"] / 8
    assert cut / 4 + rest / 2 <= held <= cut / 4 + rest / 2 + 64


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@ranks(2)
def test_one_dimension_may_have_one_rank(shape):
    mesh = mesh_of(*shape)
    _, model, oracle, _ = trained(mesh)
    same(model, oracle)


@ranks(4)
def test_parts_of_unequal_size(tmp_path):
    """Hidden 5 over two ranks: three columns and two; and an embedding of one row, of which a rank has none."""
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(3, 5, dtype=DTYPE), nn.Linear(5, 3, dtype=DTYPE))
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p)
    oracle = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})
    lone = nn.Parameter(distribute_tensor(torch.ones(1, 3, dtype=DTYPE), mesh["tp"], [Shard(0)]))
    oracle.lone, model.lone = nn.Parameter(torch.ones(1, 3, dtype=DTYPE)), lone
    engine = shard(model, mesh=mesh["dp"])
    same(model, oracle)
    x = torch.full((2, 3), 1.0 + mesh["dp"].get_local_rank(), dtype=DTYPE)
    model(x).square().sum().backward()
    (sum(oracle(torch.full((2, 3), 1.0 + i, dtype=DTYPE)).square().sum() for i in range(2)) / 2).backward()
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)
    full = engine.state_dict(rank0_only=False)
    assert all(torch.equal(full[name], value) for name, value in oracle.state_dict().items())
    engine.save(tmp_path / "sharded")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    engine.load(tmp_path / "sharded")
    same(model, oracle)
    engine.close()
    assert tuple(model[0].weight.to_local().shape) == (3 - mesh["tp"].get_local_rank(), 3)


# -- reductions and clipping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", [2.0, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (float("inf"), 0.0, 1.0))]
)
@ranks(4)
def test_gradient_norms_are_the_whole_models_on_all_ranks(order):
    mesh = mesh_of(2, 2)
    for strategy in ("full_shard", "no_shard"):
        for clip in ("engine", "torch"):
            model, oracle = parallel(mesh), Model()
            engine = shard(model, mesh=mesh["dp"], strategy=strategy)
            backward(model, mesh, 0)
            plain_backward(oracle, 0)
            expected = nn.utils.clip_grad_norm_(oracle.parameters(), 0.5, order)
            if clip == "engine":
                norm = engine.clip_grad_norm_(0.5, order)
            elif order == 0.0:
                continue  # of ranks' slices, torch would have to be told
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
            torch.testing.assert_close(norm, expected, **EXACT)
            everyone = [torch.empty_like(norm) for _ in range(4)]
            dist.all_gather(everyone, norm)
            assert len({float(n) for n in everyone}) == 1
            same(model, oracle, grads=True)


@ranks(4)
def test_reductions_to_a_number_count_every_element_once():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    shard(model, mesh=mesh["dp"])
    with torch.no_grad():
        for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
            for reduce in (torch.sum, torch.mean, torch.std, torch.max, torch.Tensor.norm, torch.count_nonzero):
                torch.testing.assert_close(reduce(p), reduce(q), **EXACT)
            weights = torch.arange(q.numel(), dtype=DTYPE).view(q.shape)
            torch.testing.assert_close(p.mul_(weights).full_tensor(), q * weights, **EXACT)
            p.copy_(weights)
            assert torch.equal(p.full_tensor(), weights)


@pytest.mark.exhaustive
@ranks(4)
def test_a_loss_term_on_parameters_themselves():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    shard(model, mesh=mesh["dp"])
    penalty = sum(p.square().sum() for p in model.parameters())
    (loss_of(model, batch(mesh["dp"].get_local_rank(), 0)) + 0.1 * penalty).backward()
    (sum(loss_of(oracle, batch(i, 0)) for i in range(2)) / 2).backward()
    (0.1 * sum(p.square().sum() for p in oracle.parameters())).backward()
    same(model, oracle, grads=True)


@pytest.mark.exhaustive
@ranks(4)
def test_one_bad_gradient_element_is_seen_by_all_ranks():
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    engine = shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    bad = torch.zeros(12, 6, dtype=DTYPE)
    bad[7, 2] = float("nan")  # on one rank of one tensor-parallel half
    model.blocks[0].up.weight.grad = bad
    with pytest.raises(NonFiniteError):
        engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
    scale, found = torch.ones(1), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([p.grad for p in model.parameters()], found, scale)
    assert found.item() == 1.0


# -- whole values -------------------------------------------------------------------------------------------------------


@ranks(4)
def test_gathered_parameters_are_dtensors_and_edits_are_kept():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    engine = shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    plain_backward(oracle, 0)
    with engine.gathered(write=True, grads=True):
        for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
            assert isinstance(p, nn.Parameter)
            if isinstance(p, DTensor):
                torch.testing.assert_close(p.detach().full_tensor(), q.detach(), **EXACT)
                torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)
            else:
                assert name.startswith("head") or name.endswith("gain")
                torch.testing.assert_close(p.grad, q.grad, **EXACT)
            with torch.no_grad():
                p.mul_(2.0)
                p.grad.mul_(3.0)
        weight = model.blocks[0].up.weight
        weight.data = weight.data + 1.0
    with torch.no_grad():
        for q in oracle.parameters():
            q.mul_(2.0)
            q.grad.mul_(3.0)
        oracle.blocks[0].up.weight.add_(1.0)
    same(model, oracle)
    same(model, oracle, grads=True)
    with pytest.raises(ConfigError, match=r"ranks: unit .* has .*, a DTensor"), engine.gathered(ranks=0):
        pass
    with pytest.raises(UnitStateError, match="distributed parameter"), engine.gathered():
        model.blocks[0].up.weight.data = torch.zeros(12, 6, dtype=DTYPE)


@pytest.mark.exhaustive
@ranks(4)
def test_a_backward_inside_gathered_is_reduced():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    engine = shard(model, mesh=mesh["dp"], debug=True)
    with engine.gathered():
        backward(model, mesh, 0)
    plain_backward(oracle, 0)
    same(model, oracle, grads=True)
    backward(model, mesh, 1)
    plain_backward(oracle, 1)
    same(model, oracle, grads=True)


@pytest.mark.exhaustive
@ranks(4)
def test_random_edits_of_gathered_parameters_leave_tensor_parallel_ranks_alike(rank):
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    engine = shard(model, mesh=mesh["dp"])
    torch.manual_seed(rank)
    with engine.gathered(model.head, write=True), torch.no_grad():
        model.head.weight.normal_()
    own = model.head.weight.full_tensor()
    everyone = [torch.empty_like(own) for _ in range(4)]
    dist.all_gather(everyone, own)
    assert all(torch.equal(other, own) for other in everyone)


class Sloped(nn.Module):
    """A buffer with values for each row of a weight that tensor parallelism cuts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 4, dtype=torch.float64)
        self.down = nn.Linear(4, 6, dtype=torch.float64)
        self.register_buffer("slopes", torch.arange(1.0, 5.0, dtype=torch.float64))

    def forward(self, x):
        return self.down(self.up(x) * self.slopes)


@ranks(4)
def test_buffers_of_a_tensor_parallel_ranks_own_stay(rank):
    mesh, oracle, model = mesh_of(2, 2), Sloped(), Sloped()
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    own = model.slopes.chunk(2)[mesh["tp"].get_local_rank()].clone()
    model.slopes = own if rank < 2 else torch.zeros_like(own)  # the first data-parallel rank's count
    shard(model, mesh=mesh["dp"])
    x = torch.ones(2, 6, dtype=torch.float64)
    for _ in range(2):
        y = model(x)
        torch.testing.assert_close(y, oracle(x), **EXACT)
        y.sum().backward()
    assert torch.equal(model.slopes, own)


@ranks(4)
def test_edits_of_gradients_in_gathered_leave_tensor_parallel_ranks_alike(rank):
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    engine = shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    torch.manual_seed(rank)
    with engine.gathered(write=True, grads=True), torch.no_grad():
        model.gain.grad.add_(torch.randn(model.gain.shape, dtype=model.gain.dtype))
        if rank % 2:
            model.head.bias.grad = None
    assert model.head.bias.grad is not None
    grads = [torch.empty_like(model.gain.grad.full_tensor()) for _ in range(4)]
    dist.all_gather(grads, model.gain.grad.full_tensor())
    assert all(torch.equal(grad, grads[0]) for grad in grads)


@ranks(4)
def test_close_gives_dtensors_back():
    mesh = mesh_of(2, 2)
    engine, model, oracle, optimizers = trained(mesh)
    backward(model, mesh, 5)
    plain_backward(oracle, 5)
    engine.close(optimizers[0])
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        found, grad = (
            (p.detach(), p.grad) if not isinstance(p, DTensor) else (p.full_tensor().detach(), p.grad.full_tensor())
        )
        torch.testing.assert_close(found, q.detach(), **EXACT)
        torch.testing.assert_close(grad, q.grad, **EXACT)
        moment = optimizers[0].state[p]["exp_avg"]
        assert isinstance(moment, DTensor) == isinstance(p, DTensor)
        moment = moment.full_tensor() if isinstance(moment, DTensor) else moment
        torch.testing.assert_close(moment, optimizers[1].state[q]["exp_avg"], **EXACT)
    assert type(model.blocks[0].up.weight) is DTensor
    for optimizer in optimizers:
        optimizer.step()  # as plain tensor parallelism, which the gradients are whole for
    again = shard(model, mesh=mesh["dp"])
    same(model, oracle)
    train(mesh, model, oracle, optimizers, range(2))
    same(model, oracle)
    again.close()


@pytest.mark.exhaustive
@ranks(4)
def test_a_copy_trains_by_itself():
    mesh = mesh_of(2, 2)
    _, model, oracle, _ = trained(mesh)
    twin, other = copy.deepcopy(model), copy.deepcopy(oracle)
    optimizers = optimizer_of(twin), optimizer_of(other)
    train(mesh, twin, other, optimizers, range(2))
    same(twin, other)
    same(model, oracle)


@ranks(4)
def test_edits_inside_a_forward_and_views_outside_one():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    shard(model, mesh=mesh["dp"])

    def clamp(module, _):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    for m in (model, oracle):
        m.blocks[1].up.register_forward_pre_hook(clamp)
    backward(model, mesh, 0)
    plain_backward(oracle, 0)
    same(model, oracle)
    same(model, oracle, grads=True)
    rows = model.blocks[0].up.weight.t()  # of memory that is released at once
    torch.testing.assert_close(rows.full_tensor(), oracle.blocks[0].up.weight.t().detach(), **EXACT)


# -- checkpoints --------------------------------------------------------------------------------------------------------


def _as_mesh(form):
    """How to build a model on 4 ranks: (model, engine, mesh or None)."""
    if form == "2x2":
        mesh = mesh_of(2, 2)
        model = parallel(mesh, seed=7)
        return model, shard(model, mesh=mesh["dp"])
    if form == "1x4":
        mesh = mesh_of(1, 4)
        model = parallel(mesh, seed=7)
        return model, shard(model, mesh=mesh["dp"])
    model = Model(seed=7)
    return model, shard(model, strategy=form)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("2x2", "full_shard"),
        pytest.param("full_shard", "2x2", marks=pytest.mark.exhaustive),
        pytest.param("2x2", "1x4", marks=pytest.mark.exhaustive),
        pytest.param("1x4", "2x2", marks=pytest.mark.exhaustive),
        pytest.param("2x2", "no_shard", marks=pytest.mark.exhaustive),
        pytest.param("no_shard", "2x2", marks=pytest.mark.exhaustive),
        pytest.param("2x2", "2x2", marks=pytest.mark.exhaustive),
    ],
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


@ranks(4)
def test_sharded_and_local_state_dicts():
    mesh = mesh_of(2, 2)
    engine, model, oracle, _ = trained(mesh)
    sharded = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in engine.state_dict(form="sharded").items()}
    local = {k: v.clone() for k, v in engine.state_dict(form="local").items()}
    for form, found in (("sharded", sharded), ("local", local)):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        engine.load_state_dict(found, form=form)
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


@pytest.mark.parametrize("how", ["mesh", pytest.param("dim", marks=pytest.mark.exhaustive)])
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


# -- more ways ----------------------------------------------------------------------------------------------------------


@ranks(4)
def test_mixed_precision_computes_in_its_dtype():
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    seen = []
    model[0].register_forward_hook(lambda m, i, o: seen.append((m.weight.dtype, m.weight.to_local().dtype, o.dtype)))
    engine = shard(model, mesh=mesh["dp"], precision=torch.bfloat16)
    model(torch.ones(2, 8)).sum().backward()
    assert seen == [(torch.bfloat16,) * 3]
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
    with engine.gathered(write=True), torch.no_grad():
        assert model[0].weight.dtype == torch.float32 and isinstance(model[0].weight, DTensor)
        model[0].weight.fill_(0.25)
    assert model[0].weight.sum().item() == 16.0


@pytest.mark.exhaustive
@ranks(4)
def test_accumulation_hooks_and_a_frozen_parameter():
    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    for m in (model, oracle):
        m.blocks[0].down.weight.requires_grad_(False)
        m.blocks[1].up.weight.register_hook(lambda grad: grad * 2)
    engine = shard(model, mesh=mesh["dp"])
    with engine.no_sync():
        backward(model, mesh, 0)
    backward(model, mesh, 1)
    plain_backward(oracle, 0)
    plain_backward(oracle, 1)
    assert model.blocks[0].down.weight.grad is None
    for p, q in zip(model.parameters(), oracle.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, **EXACT)


@pytest.mark.exhaustive
@ranks(4)
def test_a_step_in_backward_and_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    mesh = mesh_of(2, 2)
    model, oracle = parallel(mesh), Model()
    engine = shard(model, mesh=mesh["dp"])
    optimizers = optimizer_of(model), optimizer_of(oracle)
    engine.step_in_backward(optimizers[0])
    for m in (model, oracle):
        for block in m.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    for step in range(2):
        backward(model, mesh, step)
        plain_backward(oracle, step)
        optimizers[1].step()
        optimizers[1].zero_grad()
    same(model, oracle)


@ranks(4)
def test_whole_matrix_optimizers_refuse_what_is_cut():
    mesh = mesh_of(2, 2)
    model = parallel(mesh)
    shard(model, mesh=mesh["dp"])
    backward(model, mesh, 0)
    before = model.blocks[0].up.weight.full_tensor()
    optimizer = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
    with pytest.raises(ShardError, match=r"embed.weight is cut by tensor parallelism.*Nothing was changed"):
        optimizer.step()
    assert torch.equal(model.blocks[0].up.weight.full_tensor(), before)
    whole = torch.optim.Muon([model.head.weight], lr=0.1)
    whole.step()


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


def step_alike(model, oracle, optimizers):
    """A step of both on one batch, the same on all ranks, and whether it has left the same matrices."""
    for m, optimizer in zip((model, oracle), optimizers, strict=True):
        m(torch.linspace(-1.0, 1.0, 48, dtype=DTYPE).view(2, 4, 6)).square().sum().backward()
        optimizer.step()
        m.zero_grad()
    for p, q in zip(model.matrices(), oracle.matrices(), strict=True):
        torch.testing.assert_close(p.full_tensor().detach(), q.detach(), **EXACT)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("Muon", "full_shard"),
        ("Adafactor", "full_shard"),
        pytest.param("Muon", "no_shard", marks=pytest.mark.exhaustive),
        pytest.param("Adafactor", "no_shard", marks=pytest.mark.exhaustive),
        pytest.param("AdamW", "full_shard", marks=pytest.mark.exhaustive),
    ],
)
@ranks(4)
def test_state_of_plain_tensor_parallelism_is_taken_and_given_back(kind, strategy):
    mesh = mesh_of(2, 2)
    model, oracle = Placed(mesh["tp"]), Placed()
    optimizers = [getattr(torch.optim, kind)(m.matrices(), lr=0.1) for m in (model, oracle)]
    for _ in range(2):
        step_alike(model, oracle, optimizers)  # plain tensor parallelism
        engine = shard(model, mesh=mesh["dp"], strategy=strategy)
        step_alike(model, oracle, optimizers)
        engine.close(optimizers[0])
        for p, q in zip(model.matrices(), oracle.matrices(), strict=True):
            own, other = optimizers[0].state[p], optimizers[1].state[q]
            assert own.keys() == other.keys()
            for key in own.keys() - {"step"}:
                assert isinstance(own[key], DTensor), key
                torch.testing.assert_close(own[key].full_tensor(), other[key], **EXACT)


@pytest.mark.parametrize(
    "kind",
    [
        "AdamW",
        pytest.param("Muon", marks=pytest.mark.exhaustive),
        pytest.param("Adafactor", marks=pytest.mark.exhaustive),
    ],
)
@ranks(4)
def test_state_of_plain_tensor_parallelism_is_saved_and_given_back_without_a_step_in_between(kind, tmp_path):
    mesh = mesh_of(2, 2)

    def optimizer_for(m):
        return getattr(torch.optim, kind)(m.parameters() if kind == "AdamW" else m.matrices(), lr=0.1)

    def has_the_oracles(found):
        assert type(found) is dict
        for name, q in oracle.named_parameters():
            for key, value in optimizers[1].state.get(q, {}).items():
                assert type(found["state"][name][key]) is torch.Tensor
                torch.testing.assert_close(found["state"][name][key], value, **EXACT)

    model, oracle = Placed(mesh["tp"]), Placed()
    optimizers = optimizer_for(model), optimizer_for(oracle)
    step_alike(model, oracle, optimizers)
    engine = shard(model, mesh=mesh["dp"])
    has_the_oracles(engine.optim_state_dict(optimizers[0], rank0_only=False))
    engine.save(tmp_path / "sharded", optimizers[0])
    engine.save_full(tmp_path / "full.pt", optimizers[0])
    dist.barrier()
    for way in ("sharded", "full.pt"):
        other = Placed(mesh["tp"])
        into, its = shard(other, mesh=mesh["dp"]), optimizer_for(other)
        into.load(tmp_path / way, its)
        has_the_oracles(into.optim_state_dict(its, rank0_only=False))
    engine.close(optimizers[0])
    step_alike(model, oracle, optimizers)


@ranks(4)
def test_whole_matrix_optimizers_refuse_state_that_is_cut_on_one_rank(rank):
    mesh = mesh_of(2, 2)
    model = Placed(mesh["tp"])
    shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Muon(model.matrices(), lr=0.1)
    model(torch.ones(2, 4, 6, dtype=DTYPE)).sum().backward()
    kept = [p.full_tensor() for p in model.matrices()]
    for p in model.matrices():
        optimizer.state[p] = {
            "momentum_buffer": DTensor.from_local(torch.ones(4, 6, dtype=DTYPE), mesh["tp"], [Replicate()])
        }
    if rank == 3:
        half = DTensor.from_local(torch.ones(2, 6, dtype=DTYPE), mesh["tp"], [Shard(0)])
        optimizer.state[model.after]["momentum_buffer"] = half
    with pytest.raises(
        ShardError, match=rf"rank {rank}: Muon.*ranks \[3\].*state of after.*full_tensor.*Nothing was changed"
    ):
        optimizer.step()
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.matrices(), kept, strict=True))
    assert all(isinstance(optimizer.state[p]["momentum_buffer"], DTensor) for p in model.matrices())
    optimizer.state[model.after] = {"momentum_buffer": torch.ones(4, 6, dtype=DTYPE)}
    optimizer.step()
    assert not any(torch.equal(p.full_tensor(), value) for p, value in zip(model.matrices(), kept, strict=True))


# -- what is refused ----------------------------------------------------------------------------------------------------


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
    assert engine._runtime.collectives.topology.replicas == 2
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
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "strategy: 'hybrid_shard' of parameters that are parallelized" in found.stdout


def test_topologies_of_planes():
    from torch_shard.topology import Topology

    within = Topology.hybrid(4, 2)
    found = within.within([[0, 2, 4, 6], [1, 3, 5, 7]], range(8))
    assert str(found) == "0 2 | 4 6 / 1 3 | 5 7"
    assert (found.size, found.replicas, found.averaged, found.world) == (2, 2, 4, 8)
    assert found.row_of(3) == (1, 3) and found.column_of(3) == (3, 7)
    assert found.plane_of(3) == (1, 3, 5, 7) and found.whole_of(3) == (0, 1, 2, 3) and found.lane_of(3) == (2, 3, 6, 7)
    assert found.is_hybrid and not Topology.replicated(2).within([[0, 2], [1, 3]], range(4)).is_hybrid
    with pytest.raises(SetupError, match="planes"):
        Topology(((0,), (1,), (2,)), planes=2)


@pytest.mark.exhaustive
def test_nothing_is_imported_for_models_without_dtensors():
    code = (
        "import sys, torch, torch_shard; torch_shard.shard(torch.nn.Linear(2, 2)); "
        "print('torch.distributed.tensor' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False"]
