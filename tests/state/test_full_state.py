"""Full state dicts of model and optimizer: plain torch's form, and loaded all or nothing."""

from __future__ import annotations

import io
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torch_shard
from tests.checkpoint.helpers import Model
from tests.support.logs import captured_log
from tests.support.marks import exhaustive, quick
from tests.support.odd_model import Net, batch, build
from tests.support.optimizer_state import by_name
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, StateDictError, UnitStateError


def renamed(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook that takes a key of an older version."""
    if "old_scale" in state:
        state["net.scale"] = state.pop("old_scale")


def pair(**config: Any) -> tuple[Model, Model, torch_shard.Engine]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Model())
    return models[0], models[1], torch_shard.shard(models[1], unit_bytes=256, **config)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("offload", [True, False])
@ranks(2, exhaustive=(1, 3))
def test_the_full_state_dict_is_plain_torch(strategy: str, offload: bool, rank: int) -> None:
    plain, model, engine = pair(strategy=strategy)
    values = engine.state_dict(rank0_only=False, offload_to_cpu=offload)
    expected = plain.state_dict()
    assert list(values) == list(expected)
    assert values._metadata == expected._metadata
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert type(values[name]) is torch.Tensor and not values[name].requires_grad
            assert torch.equal(values[name], value) and values[name].stride() == value.stride()
            if offload and value.numel():
                assert values[name].untyped_storage().nbytes() == value.numel() * value.element_size()
        else:
            assert values[name] == value
    assert values["net.embed.weight"] is values["net.head.weight"]
    only = engine.state_dict()
    assert list(only) == (list(expected) if rank == 0 else [])
    torch.save(values, io.BytesIO())
    # A snapshot: nothing that happens later shows in it.
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
        model.norm.running_mean.add_(1.0)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(values[name], value), name


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(2, exhaustive=(3,))
def test_loading_a_plain_state_dict(strategy: str, rank: int) -> None:
    plain, model, engine = pair(strategy=strategy)
    model._register_load_state_dict_pre_hook(renamed)
    with torch.no_grad():
        for p in plain.parameters():
            p.uniform_(-1, 1)
        plain.norm.running_var.fill_(3.0)
    plain.note = "loaded"
    model.net(batch(rank))  # a gathered or prefetched unit must not keep old values
    given = plain.state_dict()
    given["old_scale"] = given.pop("net.scale")
    result = engine.load_state_dict(given)
    assert not result.missing_keys and not result.unexpected_keys
    assert model.note == "loaded"
    values = engine.state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(values[name], value), name
    torch.testing.assert_close(model.net(batch(rank)), plain.net(batch(rank)))


@ranks(2)
def test_loading_shard_tensors_of_another_engine() -> None:
    _, _, engine = pair(units=lambda name, module: name == "net.head")
    torch.manual_seed(1)
    other = Model()
    torch_shard.shard(other, unit_bytes=256)
    engine.load_state_dict(other.state_dict())
    torch.manual_seed(1)
    expected = Model().state_dict()
    values = engine.state_dict(rank0_only=False)
    assert all(torch.equal(values[n], v) for n, v in expected.items() if isinstance(v, torch.Tensor))


@ranks(2)
def test_everything_that_does_not_fit_is_listed_and_nothing_is_loaded(rank: int) -> None:
    plain, model, engine = pair()
    given: dict[str, Any] = {k: v + 1 if "net." in k else v for k, v in plain.state_dict().items()}
    del given["net.scale"], given["norm.running_var"]
    given["net.nothing"] = torch.ones(1)
    given["net.head.bias"] = torch.ones(3)
    given["mask"] = torch.ones(9).bool()
    given["_extra_state"] = {"note": "half"}
    with pytest.raises(StateDictError) as caught:
        engine.load_state_dict(given)
    for name in ("net.scale", "norm.running_var", "net.nothing", "net.head.bias", "mask", "nothing was loaded"):
        assert name in str(caught.value), name
    with pytest.raises(StateDictError, match=r"net\.head\.bias"):
        engine.load_state_dict(given, strict=False)
    # One rank alone has a bad file.
    good = {k: v for k, v in given.items() if k not in ("net.head.bias", "mask")}
    with pytest.raises(StateDictError, match="failed on rank 1" if rank == 0 else "size mismatch for mask"):
        engine.load_state_dict(good if rank == 0 else {**good, "mask": torch.ones(9)}, strict=False)
    with pytest.raises(DivergenceError):
        engine.load_state_dict(good if rank == 0 else {k: good[k] for k in list(good)[1:]}, strict=False)
    values = engine.state_dict(rank0_only=False)
    assert all(torch.equal(values[n], v) for n, v in plain.state_dict().items() if isinstance(v, torch.Tensor))
    assert model.note == "new" and isinstance(model.net.head.bias, torch_shard.ShardTensor)
    result = engine.load_state_dict(good, strict=False)
    assert set(result.missing_keys) == {"net.scale", "norm.running_var", "net.head.bias", "mask"}
    assert result.unexpected_keys == ["net.nothing"]
    torch.testing.assert_close(engine.state_dict(rank0_only=False)["net.frozen"], plain.net.frozen + 1)


@ranks(2)
def test_a_state_dict_inside_gathered_is_refused() -> None:
    _, _, engine = pair()
    with engine.gathered():
        with pytest.raises(UnitStateError, match="state_dict inside"):
            engine.state_dict()
        with pytest.raises(UnitStateError, match="load_state_dict inside"):
            engine.load_state_dict({})
    assert engine.state_dict(rank0_only=False)


# -- the optimizer ----------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    # Not fused: what is trained here grows without bounds, and rounding with it.
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "adam-fused": lambda ps: torch.optim.Adam(ps, lr=0.01, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
}


def groups(model: nn.Module) -> list[dict[str, Any]]:
    decay = [p for p in model.parameters() if p.ndim >= 2 and p.requires_grad]
    other = [p for p in model.parameters() if p.ndim < 2 and p.requires_grad]
    return [{"params": decay}, {"params": other, "weight_decay": 0.0}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, rank: int | None, world_size: int) -> None:
    for step in range(steps):
        if rank is None:
            for r in range(world_size):
                (model(batch(r + step)).pow(2).mean() / world_size).backward()
        else:
            model(batch(rank + step)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: int, world_size: int) -> tuple[Net, torch_shard.Engine, torch.optim.Optimizer]:
    """A sharded model and its optimizer after one step."""
    model = build()
    engine = torch_shard.shard(model, unit_bytes=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 1, rank, world_size)
    return model, engine, optimizer


@pytest.mark.parametrize("kind", quick(OPTIMIZERS, ["sgd", "adamw"]))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2)
def test_full_optimizer_state(kind: str, strategy: str, rank: int, world_size: int) -> None:
    plain, model = build(), build()
    engine = torch_shard.shard(model, unit_bytes=256, strategy=strategy)
    reference, optimizer = (OPTIMIZERS[kind](groups(m)) for m in (plain, model))
    train(plain, reference, 2, None, world_size)
    train(model, optimizer, 2, rank, world_size)
    expected, found = by_name(plain, reference), engine.optim_state_dict(optimizer, rank0_only=False)
    assert found["param_groups"] == expected["param_groups"]
    assert set(found["state"]) == set(expected["state"])
    for name, entries in expected["state"].items():
        assert set(found["state"][name]) == set(entries)
        for key, value in entries.items():
            mine = found["state"][name][key]
            if isinstance(value, torch.Tensor):
                assert type(mine) is torch.Tensor and mine.device.type == "cpu" and mine.shape == value.shape
                torch.testing.assert_close(mine, value, msg=f"{name} {key}")
            else:
                assert mine == value
    assert engine.optim_state_dict(optimizer) == {} or rank == 0
    torch.save(found, io.BytesIO())

    # On into a fresh model and optimizer, and then both go on alike.
    fresh = build(3)
    again = torch_shard.shard(fresh, unit_bytes=1024, strategy=strategy)
    again.load_state_dict(engine.state_dict(rank0_only=False))
    resumed = OPTIMIZERS[kind](groups(fresh))
    again.load_optim_state_dict(resumed, found)
    for entries in resumed.state.values():
        if isinstance(entries.get("step"), torch.Tensor):
            assert not isinstance(entries["step"], torch_shard.ShardTensor)
    train(plain, reference, 2, None, world_size)
    train(fresh, resumed, 2, rank, world_size)
    values = again.state_dict(rank0_only=False)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(values[name], value, msg=name)


@ranks(2)
def test_optimizer_state_that_does_not_fit_is_listed(rank: int, world_size: int) -> None:
    _model, engine, optimizer = trained(rank, world_size)
    good = engine.optim_state_dict(optimizer, rank0_only=False)
    bad = {"state": dict(good["state"]), "param_groups": [dict(good["param_groups"][0], lr=7.0)]}
    bad["state"]["head.bias"] = {**good["state"]["head.bias"], "exp_avg": torch.zeros(4)}
    bad["state"]["ghost"] = {"step": torch.tensor(1.0)}
    bad["param_groups"][0]["params"] = [n for n in good["param_groups"][0]["params"] if n != "scale"] + ["spook"]
    with pytest.raises(StateDictError) as caught:
        engine.load_optim_state_dict(optimizer, bad)
    for word in ("ghost", "spook", "scale", "head.bias: exp_avg", "nothing was loaded"):
        assert word in str(caught.value), word
    assert "strict" not in str(caught.value)
    with pytest.raises(StateDictError):
        engine.load_optim_state_dict(optimizer, good if rank == 0 else {})
    assert optimizer.param_groups[0]["lr"] == 0.01
    engine.load_optim_state_dict(optimizer, good)
    with pytest.raises(StateDictError, match="holds no parameter of this model"):
        engine.optim_state_dict(torch.optim.SGD(nn.Linear(2, 2).parameters()))


@ranks(2)
def test_optimizer_state_that_lacks_a_parameter_is_listed_without_a_remedy_that_does_not_exist(
    rank: int, world_size: int
) -> None:
    model, engine, optimizer = trained(rank, world_size)
    without = engine.optim_state_dict(optimizer, rank0_only=False)
    names = set(without["state"])
    del without["state"]["head.bias"]
    with pytest.raises(StateDictError, match=r"missing: head\.bias \(state\)(.|\n)*\['head\.bias'\] = \{\}") as caught:
        engine.load_optim_state_dict(optimizer, without)
    assert "strict" not in str(caught.value)
    assert set(engine.optim_state_dict(optimizer, rank0_only=False)["state"]) == names
    with captured_log() as said:  # where nothing would be overwritten, it starts anew beside others that go on
        engine.load_optim_state_dict(torch.optim.AdamW(model.parameters()), without)
    assert rank or any("no state for" in line and "head.bias" in line for line in said), said
    # Where it is meant, and where a parameter was never used: `conv.bias` has no state in plain torch either.
    without["state"]["head.bias"] = {}
    engine.load_optim_state_dict(optimizer, without)
    assert "head.bias" not in engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    train(model, optimizer, 1, rank, world_size)


class Nested(torch.optim.SGD):
    """Keeps tensors within containers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["pair"] = (torch.ones_like(p), [torch.zeros_like(p)])


@ranks(2)
def test_optimizer_state_is_whole_within_containers(rank: int, world_size: int) -> None:
    model = build()
    engine = torch_shard.shard(model, unit_bytes=256)
    optimizer = Nested(model.parameters(), lr=0.1)
    train(model, optimizer, 1, rank, world_size)
    state = engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    for name, p in model.named_parameters():
        ones, (zeros,) = state[name]["pair"]
        assert type(ones) is type(zeros) is torch.Tensor and ones.shape == zeros.shape == p.shape
        assert bool((ones == 1).all()) and bool((zeros == 0).all())


@pytest.mark.parametrize("what", ["state_dict", "optim_state_dict"])
@ranks(2)
def test_one_gathered_buffer_is_in_memory_at_a_time(rank: int, world_size: int, what: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    engine = torch_shard.shard(model, units=[nn.Linear])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    empty, made, alive = torch.empty, [], []

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = empty(*args, **kwargs)
        if result.numel() >= 64 * 64:
            alive.append(sum(ref() is not None for ref in made))
            made.append(weakref.ref(result))
        return result

    with mock.patch.object(torch, "empty", noted):
        engine.state_dict() if what == "state_dict" else engine.optim_state_dict(optimizer)
    assert len(alive) >= 3 and set(alive) == {0}
