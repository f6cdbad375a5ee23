"""From a plain model to a sharded one: over which ranks, with which first values, and in how many messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, plain_backward, same_params
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, SetupError
from torch_shard.shard_tensor.tensor import ShardTensor

STRATEGIES = ["full_shard", "shard_grad_op", "shard_optim", "no_shard"]


def trains_like_plain(model: nn.Module, plain: nn.Module, rank: int, members: Sequence[int]) -> None:
    """Train `model`, sharded over the ranks `members`, and `plain` on the batches of all of them together."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(3):
        plain_backward(model, batch(rank, step))
        (sum(loss_of(plain(batch(r, step))) for r in members) / len(members)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_params(model, plain)


def built_with(seed: int, build: Callable[[], nn.Module] = MLP) -> nn.Module:
    torch.manual_seed(seed)
    return build().double()


# -- mesh ---------------------------------------------------------------------------------------------------------------


def one_dimension(rank: int, world_size: int) -> tuple[Any, list[int]]:
    return init_device_mesh("cpu", (world_size,)), list(range(world_size))


def process_group(rank: int, world_size: int) -> tuple[Any, list[int]]:
    return dist.new_group(list(range(world_size))), list(range(world_size))


def one_rank_group(rank: int, world_size: int) -> tuple[Any, list[int]]:
    return [dist.new_group([r]) for r in range(world_size)][rank], [rank]


def one_rank_mesh(rank: int, world_size: int) -> tuple[Any, list[int]]:
    return init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("outer", "inner"))["inner"], [rank]


def a_device(rank: int, world_size: int) -> tuple[Any, list[int]]:
    return torch.device("cpu"), list(range(world_size))


def train_over(mesh: Any, members: Sequence[int], rank: int, **settings: Any) -> torch_shard.Engine:
    """Shard a model over a mesh of these ranks, and train it like a plain one."""
    model, plain = built_with(rank), built_with(members[0])
    engine = torch_shard.shard(model, mesh=mesh, unit_bytes=500, timeout=20.0, **settings)
    assert (engine.world_size, engine.rank) == (len(members), list(members).index(rank))
    trains_like_plain(model, plain, rank, members)
    return engine


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@pytest.mark.parametrize("mesh", [one_dimension, *exhaustive(process_group), one_rank_group, one_rank_mesh, a_device])
@ranks(2)
def test_training_over_a_mesh_is_like_plain(rank, world_size, mesh, strategy):
    over, members = mesh(rank, world_size)
    engine = train_over(over, members, rank, strategy=strategy)
    assert (engine.bytes_sent == 0) == (len(members) == 1)


@ranks(3)
def test_training_over_a_mesh_of_ranks_in_another_order_is_like_plain(rank):
    model, plain = built_with(5), built_with(5)
    torch_shard.shard(model, mesh=DeviceMesh("cpu", [2, 1, 0]), unit_bytes=500, timeout=20.0)
    trains_like_plain(model, plain, rank, range(3))


@pytest.mark.parametrize("name", [*exhaustive("rows"), "columns"])
@ranks(4)
def test_training_over_one_dimension_of_a_mesh_is_like_plain_on_the_batches_of_those_ranks(rank, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    # Along `rows` the ranks are 0 and 2, or 1 and 3; along `columns` 0 and 1, or 2 and 3.
    train_over(
        mesh[name], [r for r in range(4) if (r % 2 == rank % 2 if name == "rows" else r // 2 == rank // 2)], rank
    )


@ranks(3)
def test_training_over_a_group_of_some_ranks_needs_nothing_of_the_others(rank):
    group = dist.new_group([0, 2])
    if rank != 1:
        train_over(group, [0, 2], rank)


@ranks(2)
def test_a_device_that_shards_cannot_be_on_is_an_error_that_names_it(rank):
    model = MLP()
    with pytest.raises(SetupError, match=r"mesh: meta is no device of this machine's"):
        torch_shard.shard(model, mesh=torch.device("meta"))
    with pytest.raises(ConfigError, match=r"mesh_dims names dimensions of a DeviceMesh"):
        torch_shard.shard(model, mesh=torch.device("cpu"), mesh_dims="dp")
    torch_shard.shard(model)  # nothing has changed


# -- parameters on meta -------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """A user's own module with two parameters, one of which may be forgotten by its initialiser."""

    def __init__(self, width: int, forget: bool = False) -> None:
        super().__init__()
        self.forget = forget
        self.gain, self.shift = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        if not self.forget:
            nn.init.zeros_(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.shift


def varied() -> nn.Module:
    """Constant and random fills, buffers, and an embedding whose padding row needs the whole parameter."""
    embedding = nn.Embedding(9, 7, padding_idx=2)
    return nn.Sequential(embedding, nn.Linear(7, 5), Scale(5), nn.BatchNorm1d(5), nn.LayerNorm(5))


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().double()


def agree_on_values(model: nn.Module, world_size: int) -> None:
    """What this rank holds of parameters that are not cut is what all ranks hold. Collective."""
    for name, p in model.named_parameters():
        value = p.to_local().detach().clone()
        everyone = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(everyone, value)
        assert all(torch.equal(value, other) for other in everyone), name


def fill(module: nn.Module, extra: float = 0.0) -> None:
    """An initialiser that needs no random numbers."""
    for p in module.parameters(recurse=False):
        p.copy_(torch.arange(p.numel(), dtype=p.dtype).view(p.shape) / 7 + extra)
    for b in module.buffers(recurse=False):
        b.fill_(3)


def drawn(seed: int) -> nn.Module:
    """A plain model. One converted afterwards would hold values drawn as float32."""
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.float64)
    try:
        return varied()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@pytest.mark.parametrize("how", ["reset_parameters", "init_fn", "an init_fn of each rank's own"])
@ranks(2, exhaustive=(1, 3))
def test_parameters_on_meta_get_rank_0s_values_of_what_initialises_a_plain_model(rank, world_size, strategy, how):
    plain, settings = drawn(5), {}
    if how != "reset_parameters":
        plain = varied().double()
        with torch.no_grad():
            plain.apply(fill)
        extra = 0.0 if how == "init_fn" else 10.0 * rank
        settings["init_fn"] = lambda module: fill(module, extra)
    model = on_meta(varied)
    torch.manual_seed(5 + 10 * rank)  # rank 0's state counts
    torch_shard.shard(model, strategy=strategy, unit_bytes=200, timeout=20.0, **settings)
    assert all(type(p) is nn.Parameter or isinstance(p, ShardTensor) for p in model.parameters())
    same_params(model, plain)
    if strategy == "no_shard" and world_size > 1:
        agree_on_values(model, world_size)


@ranks(2)
def test_init_fn_is_called_once_with_each_module_that_holds_something_on_meta(rank, world_size):
    seen: list[nn.Module] = []
    model = nn.Sequential(on_meta(varied), nn.Linear(5, 3).double())

    def init(module: nn.Module) -> None:
        seen.append(module)
        fill(module)

    torch_shard.shard(model, units=["0.*", "1"], init_fn=init, timeout=20.0)
    assert sorted(map(id, seen)) == sorted(map(id, model[0]))


class Bare(nn.Module):
    """A module with a parameter and no way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


def on_scale(module: nn.Module) -> None:
    """An initialiser that forgets the shift of a `Scale`."""
    fill(module) if isinstance(module, nn.Linear) else nn.init.ones_(module.gain)


FORGETFUL: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "reset_parameters": (lambda: Scale(3, forget=True), {}, "parameter 1.shift .*uninitialised"),
    "init_fn": (lambda: Scale(3), {"init_fn": on_scale}, "parameter 1.shift .*uninitialised"),
    "nothing": (Bare, {}, r"parameter 1\.weight .*init_fn"),
}


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@pytest.mark.parametrize("how", FORGETFUL)
@ranks(2, exhaustive=(1,))
def test_a_parameter_left_uninitialised_is_an_error_that_names_it(rank, strategy, how):
    last, settings, said = FORGETFUL[how]
    model = on_meta(lambda: nn.Sequential(nn.Linear(4, 3), last()))
    with pytest.raises(SetupError, match=said):
        torch_shard.shard(model, strategy=strategy, unit_bytes=50, timeout=20.0, **settings)


# -- sync_module_states -------------------------------------------------------------------------------------------------


class WithBuffers(MLP):
    """Parameters and buffers of several dtypes, with values that depend on the seed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("mask", torch.rand(5) > 0.5)
        self.register_buffer("table", torch.randint(0, 100, (2, 3)))
        self.norm.running_mean.normal_()
        self.norm.num_batches_tracked.fill_(torch.randint(0, 100, ()).item())


@pytest.mark.parametrize("strategy", quick(STRATEGIES, ["full_shard"]))
@ranks(2, exhaustive=(3,))
def test_with_sync_module_states_all_ranks_start_from_rank_0s_values(rank, world_size, strategy):
    model, first = built_with(rank, WithBuffers), built_with(0, WithBuffers)
    torch_shard.shard(model, strategy=strategy, unit_bytes=500, timeout=20.0)
    same_params(model, first)
    for name, b in model.named_buffers():
        assert torch.equal(b, first.get_buffer(name)), name
    if strategy == "no_shard":
        agree_on_values(model, world_size)


class Taken(TorchFunctionMode):
    """Adds up the bytes of tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_strided) and found.device.type != "meta":
            self.nbytes += found.nbytes
        return found


@ranks(2)
def test_ranks_on_meta_never_have_memory_for_the_full_model(rank):
    with torch.device("meta" if rank else "cpu"):
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    full = sum(p.numel() * p.element_size() for p in model.parameters())
    with Taken() as taken:
        torch_shard.shard(model, units=[torch.nn.Linear])
    # A shard and, one after the other, the full buffers of the units: once for the values, once for the gathers to come.
    assert taken.nbytes < 2.6 * full


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", *exhaustive("shard_grad_op")])
@ranks(2, exhaustive=(3,))
def test_without_sync_module_states_each_rank_keeps_its_own_values(rank, world_size, strategy):
    model, own = built_with(rank, WithBuffers), built_with(rank, WithBuffers)
    torch_shard.shard(model, strategy=strategy, unit_bytes=500, sync_module_states=False, timeout=20.0)
    for name, p in own.named_parameters():
        local = model.get_parameter(name).to_local().view(-1)
        sizes: list[Any] = [None] * world_size
        dist.all_gather_object(sizes, local.numel())
        if strategy == "no_shard":
            assert torch.equal(local, p.detach().view(-1)), name
        else:  # the shards of the ranks follow each other
            assert sum(sizes) == p.numel()
            assert torch.equal(local, p.detach().view(-1)[sum(sizes[:rank]) :][: sizes[rank]]), name
    for name, b in own.named_buffers():
        assert torch.equal(model.get_buffer(name), b), name


class Counts(nn.Module):
    """Has a buffer that it replaces, not edits, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.sum()
        return x


@pytest.mark.parametrize("copied", [False, True])
@ranks(2)
def test_a_buffer_of_an_ignored_module_stays_the_ranks_own(rank, copied):
    model = nn.Sequential(Counts(), nn.Linear(3, 3), Counts())
    torch_shard.shard(model, ignore=[model[0]], timeout=20.0)
    if copied:
        model = copy.deepcopy(model)
    for _ in range(3):
        model(torch.full((2, 3), 1.0 + rank)).sum().backward()
    assert model[0].seen.item() == 3 * 6 * (1 + rank)


# -- under inference_mode -------------------------------------------------------------------------------------------------


@ranks(1, 2)
@pytest.mark.parametrize("on_meta", [*exhaustive(False), True])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "no_shard")])
def test_a_model_sharded_under_inference_mode_evaluates_and_then_trains_like_plain(rank, world_size, strategy, on_meta):
    plain = built_with(0)
    if on_meta:
        with torch.device("meta"):
            model = built_with(0)
    else:
        model = copy.deepcopy(plain)
    with torch.inference_mode():
        engine = torch_shard.shard(model, unit_bytes=300, strategy=strategy)
        if on_meta:
            engine.load_state_dict(plain.state_dict())
        torch.testing.assert_close(model(batch(rank, 9)), plain(batch(rank, 9)))
    trains_like_plain(model, plain, rank, range(world_size))
