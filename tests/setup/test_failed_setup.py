"""A ``shard`` that fails, on whichever rank and at whichever point, has changed nothing, and can be called again."""

from __future__ import annotations

import contextlib
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torch_shard
from tests.compat.harness import same_params
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from tests.tensor_parallel import harness as tensor_parallel
from torch_shard.errors import CheckpointError, SetupError, ShardError
from torch_shard.setup.lazy_param import Deferred, defer

# -- what a model is ------------------------------------------------------------------------------------------------------


def tensor_state(tensor: torch.Tensor) -> list[Any]:
    """All that a user can see of a tensor, without its values."""
    return [
        id(tensor), type(tensor), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad,
        sorted(tensor.__dict__), id(tensor.grad), id(tensor._backward_hooks), list(tensor._backward_hooks or ()),
        list(getattr(tensor, "_post_accumulate_grad_hooks", None) or ()),
    ]  # fmt: skip


def module_state(module: nn.Module) -> list[Any]:
    hooks = [
        (name, list(value))
        for name, value in sorted(module.__dict__.items())
        if "hooks" in name and isinstance(value, dict)
    ]
    weights: list[Any] = []
    if isinstance(module, nn.RNNBase):
        live = [ref is not None and ref() is not None for ref in module._flat_weight_refs]
        weights = [list(map(id, module._flat_weights)), live]
    return [sorted(module.__dict__), hooks, weights, module.training]


class Snapshot:
    """What a model is, to be compared with what it is later."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.states = {name: tensor_state(t) for name, t in self.tensors.items()}
        self.modules = {name: module_state(m) for name, m in model.named_modules()}
        self.values = {name: t.detach().clone() for name, t in self.tensors.items() if t.device.type != "meta"}
        self.grads = {name: t.grad.clone() for name, t in self.tensors.items() if t.grad is not None}

    def check(self) -> None:
        found = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        assert list(found) == list(self.tensors)
        for name, tensor in found.items():
            assert tensor is self.tensors[name], name
            assert tensor_state(tensor) == self.states[name], name
            if name in self.values:
                assert torch.equal(tensor, self.values[name]), name
            if name in self.grads:
                assert torch.equal(tensor.grad, self.grads[name]), name
        for name, module in self.model.named_modules():
            assert module_state(module) == self.modules[name], name
        assert torch_shard.engine_of(self.model) is None


# -- models -----------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two kinds of RNN, a tied weight, a buffer, and some plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.gru = nn.GRU(6, 6, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.gru(self.lstm(self.embed(x))[0])[0]
        return self.head(self.body(self.norm(h[:, -1])))


WORDS = torch.arange(12).reshape(4, 3) % 11


def real() -> nn.Module:
    """With values, gradients, and hooks on a parameter."""
    torch.manual_seed(3)
    model = Net()
    model(WORDS).square().sum().backward()
    model.body[0].weight.register_hook(lambda grad: grad)
    model.body[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    model.body[0].weight.label = "mine"
    return model


def meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def mixed() -> nn.Module:
    """Layers on meta beside others that have values."""
    model = real()
    with torch.device("meta"):
        model.body = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 6))
        model.norm = nn.BatchNorm1d(6)
    model.norm.weight = nn.Parameter(torch.ones(6))
    return model


def deferred() -> nn.Module:
    """Without values, but for those of added layers."""
    model = meta()
    model.norm = nn.BatchNorm1d(6)
    for name, p in model.named_parameters():
        if p.device.type == "meta":
            defer(p, Deferred(lambda p=p: torch.full(p.shape, 0.25), f"{name} of a file"))
    model.body.append(nn.Linear(6, 6))
    return model


MODELS = {"real": real, "meta": meta, "mixed": mixed, "deferred": deferred}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(WORDS).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fails(model: nn.Module, rank: int, failing: int, match: str, settings: dict[str, Any], kind: Any = None) -> None:
    """Fail to shard on rank `failing`, with an error of `kind` there, and find everything as it was."""
    before = Snapshot(model)
    numbers = torch.get_rng_state()
    with pytest.raises(kind if rank == failing and kind is not None else SetupError, match=match) as error:
        torch_shard.shard(model, unit_bytes=300, timeout=20.0, **settings)
    assert rank == failing or f"rank {failing}: " in str(error.value)
    before.check()
    assert torch.equal(torch.get_rng_state(), numbers)


# -- user code --------------------------------------------------------------------------------------------------------------


class Broken(Exception):
    pass


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@pytest.mark.parametrize("synchronise", [True, *exhaustive(False)])
@pytest.mark.parametrize("kind", ["meta", "mixed"])
@ranks(1, 2)
def test_an_init_fn_that_raises_on_one_rank_changes_nothing_on_any(rank, world_size, kind, strategy, synchronise):
    model, failing = MODELS[kind](), world_size - 1
    settings = {"strategy": strategy, "sync_module_states": synchronise}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank)  # which rank 0's values would replace

    def init(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.5)
        if rank == failing and isinstance(module, nn.LayerNorm | nn.GRU):
            raise Broken("no idea")

    fails(model, rank, failing, "no idea", {**settings, "init_fn": init}, Broken)
    torch_shard.shard(model, unit_bytes=300, timeout=20.0, **settings)
    train(model, optimizer)


@ranks(2)
def test_a_parameter_that_nothing_initialises_changes_nothing(rank):
    model = mixed()
    with torch.device("meta"):
        model.extra = nn.Module()
        model.extra.weight = nn.Parameter(torch.empty(3))
    before = Snapshot(model)
    with pytest.raises(SetupError, match=r"extra\.weight .*uninitialised"):
        torch_shard.shard(model, unit_bytes=300)
    before.check()


# -- files --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [False, True])
@ranks(1, 2)
def test_a_file_that_one_rank_cannot_read_changes_nothing_on_any(rank, world_size, ignored):
    model, failing, gone = deferred(), world_size - 1, [True]

    def values(shape: torch.Size) -> torch.Tensor:
        if rank == failing and gone:
            raise OSError("the disk is gone")
        return torch.full(shape, 0.75)

    for name, p in model.named_parameters():
        if p.device.type == "meta":
            defer(p, Deferred(lambda p=p: values(p.shape), f"{name} of a file"))
    settings = {"ignore": ["body.0.weight"]} if ignored else {}
    fails(model, rank, failing, "the disk is gone", settings, CheckpointError)
    gone.clear()
    engine = torch_shard.shard(model, unit_bytes=300, timeout=20.0, **settings)
    assert torch.equal(engine.state_dict(rank0_only=False)["body.0.weight"], torch.full((5, 6), 0.75))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


# -- memory -------------------------------------------------------------------------------------------------------------------


# Functions that take memory, for values that come later and for values that are there.
TAKES = {
    "empty": (torch.empty, torch.empty_like, torch.empty_strided),
    "copied": (torch.zeros, torch.zeros_like, torch.cat, torch.Tensor.clone, torch.Tensor.to),
}


class Memory(TorchFunctionMode):
    """Has no room for one tensor, after a number of others."""

    def __init__(self, room: int, kind: str = "empty") -> None:
        super().__init__()
        self.room, self.takes = room, TAKES[kind]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.takes:
            self.room -= 1
            if self.room == -1:
                raise torch.OutOfMemoryError("out of memory")
        return func(*args, **(kwargs or {}))


def until_there_is_room(
    rank: int, failing: int, build: Callable[[], nn.Module], settings: dict[str, Any], kind: str = "empty"
) -> int:
    """Shard without room for one tensor more each time, on one rank; return how often it has failed."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = Snapshot(model)
    for failures in range(1000):
        said = ""
        with Memory(failures if rank == failing else 1_000_000, kind):
            try:
                engine = torch_shard.shard(model, unit_bytes=300, timeout=20.0, **settings)
            except (torch.OutOfMemoryError, SetupError) as error:
                said = f"{type(error).__name__}: {error}"
        if said:
            kinds = "OutOfMemoryError" if rank == failing else f"SetupError: .*rank {failing}: OutOfMemoryError"
            assert re.match(rf"{kinds}: out of memory", said), said
            before.check()
            continue
        plain = build()
        for p in plain.parameters():
            p.data = p.to(model.embed.weight.dtype)  # another one with master_dtype
        if all(p.device.type != "meta" for p in plain.parameters()):
            same_params(model, plain)
        train(model, optimizer)
        engine.close(optimizer)
        return failures
    raise AssertionError("it never has enough")


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@pytest.mark.parametrize("memory", ["empty", *exhaustive("copied")])
@pytest.mark.parametrize("kind", MODELS)
@ranks(2, exhaustive=(1,), timeout=120)
def test_whatever_memory_is_missing_on_one_rank_nothing_changes_on_any(rank, world_size, kind, memory, strategy):
    assert until_there_is_room(rank, world_size - 1, MODELS[kind], {"strategy": strategy}, memory) > 2


@ranks(2)
def test_missing_memory_is_no_fault_of_the_file_that_is_read(rank):
    model = deferred()
    with Memory(0 if rank else 1_000_000, "copied"), pytest.raises((torch.OutOfMemoryError, SetupError)) as error:
        torch_shard.shard(model, unit_bytes=300, timeout=20.0)
    assert str(error.value) == (
        "out of memory" if rank else "sharding failed on another rank: rank 1: OutOfMemoryError: out of memory"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_module_states": False},
        {"precision": torch_shard.Precision(param_dtype=torch.bfloat16, keep=[nn.BatchNorm1d])},
        {"precision": torch_shard.Precision(master_dtype=torch.bfloat16)},  # shards can't give fp32 values back
        {"offload": "cpu"},
        *exhaustive({"strategy": "hybrid_shard", "shard_size": 2}),
    ],
    ids=lambda settings: next(iter(settings)),
)
@ranks(2, exhaustive=(4,), timeout=120)
def test_whatever_memory_is_missing_with_other_settings_nothing_changes(rank, world_size, settings):
    if "shard_size" in settings and world_size == 2:
        settings = {"strategy": "hybrid_shard", "shard_size": 1}
    assert until_there_is_room(rank, 1, real, settings) > 2


@pytest.mark.exhaustive
@ranks(4, timeout=120)
def test_whatever_memory_is_missing_parameters_of_tensor_parallelism_stay_what_they_are(rank, world_size):
    mesh = tensor_parallel.mesh_of(2, 2)
    model = tensor_parallel.parallel(mesh)
    before = {
        name: (type(p), p.to_local().clone() if hasattr(p, "to_local") else p.clone())
        for name, p in model.named_parameters()
    }
    tokens, failures = tensor_parallel.batch(0, 0), 0
    expected = model(tokens).detach()
    for room in (5, 15, 30, 1_000_000):
        with Memory(room if rank == 2 else 1_000_000):
            try:
                torch_shard.shard(model, mesh=mesh["dp"], unit_bytes=1000, timeout=20.0)
                break
            except (torch.OutOfMemoryError, SetupError):
                failures += 1
        for name, p in model.named_parameters():
            kind, values = before[name]
            assert type(p) is kind, name
            assert torch.equal(p.to_local() if hasattr(p, "to_local") else p, values), name
    assert failures > 0
    torch.testing.assert_close(model(tokens).detach(), expected)


class TwiceNoMemory(Memory):
    """Has no room for two tensors, after a number of others."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.takes and self.room == -1:
            self.room -= 1
            raise torch.OutOfMemoryError("out of memory")
        return super().__torch_function__(func, types, args, kwargs)


@ranks(2, fresh=True, timeout=60)
def test_where_memory_is_missing_for_the_undoing_too_no_parameter_gets_wrong_values(rank):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    for number, layer in enumerate(model):
        nn.init.constant_(layer.weight, number)
    memory = TwiceNoMemory(12) if rank else contextlib.nullcontext()
    with memory, pytest.raises((torch.OutOfMemoryError, ShardError)):
        torch_shard.shard(model, units=[nn.Linear], timeout=3.0)
    plain = [isinstance(layer.weight, torch_shard.ShardTensor) for layer in model].count(False)
    assert 0 < plain < len(model)
    for number, layer in enumerate(model):
        own = layer.weight.to_local() if isinstance(layer.weight, torch_shard.ShardTensor) else layer.weight
        assert (own == number).all(), number


@ranks(1)
def test_an_interrupted_shard_changes_nothing(rank):
    model, interrupts = mixed(), [True]
    before = Snapshot(model)

    def init(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)
        if isinstance(module, nn.LayerNorm) and interrupts:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torch_shard.shard(model, unit_bytes=300, init_fn=init)
    before.check()


@ranks(2)
def test_a_model_that_was_sharded_is_all_that_is_left_of_its_set_up(rank):
    """Whole gradients, and parameters that have moved, would stay in memory until the garbage collector comes."""
    model = real()
    grads = [weakref.ref(p.grad) for p in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        torch_shard.shard(model, unit_bytes=300, timeout=20.0)
        assert [grad() for grad in grads] == [None] * len(grads)
    finally:
        gc.enable()
