"""One rank alone reads what it has computed from parameters, as under DDP, while the others do something else."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, ReplacedParameterError, ShardPicklingError, UnitStateError


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 7, dtype=dtype)
        self.second = nn.Linear(7, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-1, 1, 20, dtype=dtype).view(4, 5)


def train(model: nn.Module) -> None:
    model(batch(model.scale.dtype)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, torch_shard.Engine, nn.Module]:
    """Return a sharded model, its engine and a plain model, both trained for a step."""
    plain, sharded = Net(dtype), Net(dtype)
    engine = torch_shard.shard(sharded, units=["first", "second"], **settings)
    for model in (plain, sharded):
        train(model)
    return sharded, engine, plain


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def without_gradients(read: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    return torch.no_grad()(read)


READS: dict[str, Callable[[nn.Module], Any]] = {
    "a mean": lambda m: m.first.weight.abs().mean(),
    "a mean of data": lambda m: m.first.weight.data.abs().mean(),
    "a norm in double": lambda m: m.first.weight.detach().double().norm(),
    "a largest value": without_gradients(lambda m: (m.first.weight * 2 + 1).abs().max()),
    "a sum of squares": lambda m: sum((p**2).sum() for p in m.parameters()),
    "a sum over one dimension": without_gradients(lambda m: m.first.weight.pow(2).sum(0)),
    "an element": lambda m: (m.first.weight * 2)[1, 2].item(),
    "a finite check": lambda m: [torch.isfinite(p).all().item() for p in m.parameters()],
    "a comparison": lambda m: torch.equal(m.first.weight.clone(), m.first.weight),
    "a masked sum": without_gradients(lambda m: torch.where(m.first.weight > 0, m.first.weight, 0.0).sum()),
    "numbers": lambda m: (m.second.bias + 1).tolist(),
    "an array": lambda m: m.first.weight.detach().cpu().double().numpy(),
    "an array of a parameter": lambda m: np.asarray(m.first.weight.detach()).copy(),
    "norms of a list": lambda m: torch.stack(
        torch._foreach_norm(torch._foreach_mul([p.data for p in m.parameters()], 2))
    ),
    "a histogram": lambda m: torch.histc(m.first.weight.detach().abs(), 4),
    "singular values": without_gradients(lambda m: torch.linalg.svdvals(m.first.weight.double())),
    "a scalar parameter": lambda m: float(m.scale.detach() * 2),
    "a file in halves": lambda m: saved({k: v.half() for k, v in m.state_dict().items()}),
    "a file of deep copies": lambda m: saved(copy.deepcopy(m.state_dict())),
    "a norm of a deep copy": lambda m: copy.deepcopy(m.state_dict())["first.weight"].norm(),
    "a product with a deep copy": lambda m: torch.ones(2, 7) @ copy.deepcopy(m.state_dict())["first.weight"],
    "a file of clones": lambda m: saved({k: v.detach().clone().cpu() for k, v in m.state_dict().items()}),
}


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected)


def goes_on(sharded: nn.Module, engine: torch_shard.Engine, plain: nn.Module) -> None:
    """Train once more, and compare."""
    for model in (sharded, plain):
        train(model)
    same(engine.state_dict(rank0_only=False), plain.state_dict())


SELDOM = [
    "a mean of data",
    "a finite check",
    "singular values",
    "a histogram",
    "a file in halves",
    "a scalar parameter",
]


@pytest.mark.parametrize("read", quick(READS, [name for name in READS if name not in SELDOM]))
@ranks(2, exhaustive=(3,))
def test_one_rank_reads_alone_what_plain_torch_gives(rank: int, read: str) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    for reader in (0, 1):
        if rank == reader:
            same(READS[read](sharded), READS[read](plain))
            assert engine.statistics().lone_reads > 0
        goes_on(sharded, engine, plain)


@pytest.mark.parametrize("read", quick(READS, ["a mean", "an array", "norms of a list", "a sum over one dimension"]))
@ranks(2, exhaustive=(3,))
def test_all_ranks_read_together_what_plain_torch_gives(rank: int, read: str) -> None:
    if read.startswith("a file"):
        pytest.skip("each rank reads for itself what it writes to a file")
    sharded, engine, plain = made()
    same(READS[read](sharded), READS[read](plain))
    assert engine.statistics().lone_reads == 0
    goes_on(sharded, engine, plain)


@ranks(2)
def test_an_array_can_not_be_written_to(rank: int) -> None:
    sharded, _, _ = made()
    with pytest.raises(RuntimeError, match="requires grad"):
        sharded.first.weight.numpy()
    for found in (sharded.first.weight.detach().numpy(), np.asarray(sharded.first.weight.data * 2)):
        with pytest.raises(ValueError, match="read-only"):
            found[0, 0] = 1.0


CHANGED: dict[str, Callable[[nn.Module, torch_shard.Engine], torch.Tensor]] = {
    "the result": lambda m, e: m.first.weight.detach().clone().mul_(2),
    "a copy of it": lambda m, e: copy.deepcopy(m.first.weight.detach().abs()).add_(1),
    "a deep copy": lambda m, e: copy.deepcopy(m.state_dict())["first.weight"].add_(1),
    "what was copied": lambda m, e: then(copy.deepcopy(m.state_dict())["first.weight"], lambda: train(m)),
    "an operand": lambda m, e: then(m.first.weight.detach().abs(), lambda: train(m)),
    "an operand, by a load": lambda m, e: then(
        m.first.weight.detach().abs(), lambda: e.load_state_dict(Net().state_dict())
    ),
    "a factor": lambda m, e: scaled(m.first.weight.detach(), torch.tensor(2.0)),
}


def then(result: torch.Tensor, act: Callable[[], Any]) -> torch.Tensor:
    act()
    return result


def scaled(weight: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return then(weight * factor, factor.zero_)


@pytest.mark.parametrize("changed", CHANGED)
@ranks(2)
def test_what_has_changed_since_it_was_computed_needs_all_ranks(rank: int, changed: str) -> None:
    sharded, engine, _ = made()
    tensor = CHANGED[changed](sharded, engine)
    torch.testing.assert_close(tensor.mean(), tensor.full_tensor().mean())
    with pytest.raises(ShardPicklingError):
        saved(tensor)
    with pytest.raises(
        DivergenceError, match=r"rank 0: mean of what was computed from first\.weight .*test_lone_derived"
    ):
        if rank == 0:
            tensor.mean()
        else:
            train(sharded)


@ranks(2)
def test_what_was_computed_before_a_file_was_loaded_needs_all_ranks(rank: int, tmp_path: Path) -> None:
    sharded, engine, _ = made()
    for name in ("one", "two"):
        engine.save(tmp_path / name)
        train(sharded)
    engine.load(tmp_path / "one")
    tensor = sharded.first.weight.detach() * 2.0
    engine.load(tmp_path / "two")
    with pytest.raises(ShardPicklingError):
        saved(tensor)


@ranks(2)
def test_all_ranks_read_what_has_changed_after_one_rank_was_alone(rank: int) -> None:
    sharded, _, plain = made(alone_after=0.1)
    kept = [model.first.weight.detach() * 1.0 for model in (sharded, plain)]
    for model in (sharded, plain):
        train(model)
    if rank == 0:
        same(sharded.second.bias.abs().sum(), plain.second.bias.abs().sum())
    for _ in range(2):
        same(kept[0].sum(), kept[1].sum())
    dist.barrier()


class Cached(Net):
    """Computes with what was computed from a parameter before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.kept.sum()


@ranks(2)
def test_what_has_changed_is_refused_in_a_forward_of_one_rank(rank: int) -> None:
    sharded, plain = Cached(), Cached()
    engine = torch_shard.shard(sharded, units=["first", "second"], alone_after=0.1)
    for model in (sharded, plain):
        model.kept = model.first.weight.detach() * 2.0
    with torch.no_grad():
        if rank == 0:
            same(sharded(batch()), plain(batch()))
        dist.barrier()
    for model in (sharded, plain):
        train(model)
    with torch.no_grad():
        if rank == 0:
            with pytest.raises(UnitStateError, match=r"sum of .* from first\.weight .* concerns all ranks"):
                sharded(batch())
        dist.barrier()
    goes_on(sharded, engine, plain)


@ranks(2)
def test_a_backward_through_a_value_that_one_rank_has_read_is_an_error(rank: int) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    if rank == 0:
        penalty = sharded.first.weight.abs().sum()
        with pytest.raises(DivergenceError, match=r"first\.weight.*alone has read.*test_lone_derived"):
            penalty.backward()
    sharded.zero_grad()
    goes_on(sharded, engine, plain)


@ranks(2)
def test_a_penalty_of_all_ranks_trains_as_in_plain_torch(rank: int) -> None:
    sharded, engine, plain = made()
    for model in (sharded, plain):
        for _ in range(2):
            loss = model(batch()).square().mean()
            (loss + 0.01 * sum(p.abs().mean() + (p * 2).pow(2).sum() for p in model.parameters())).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@ranks(2)
def test_long_chains_and_averages_keep_no_memory(rank: int) -> None:
    sharded, _, _ = made()
    weight = sharded.first.weight.detach()
    total = average = weight * 1.0
    for _ in range(40):
        total = total + weight
        train(sharded)
        average = average * 0.9 + weight * 0.1
    assert calls(total) <= 16
    assert calls(average) <= 3


def calls(tensor: Any) -> int:
    """How many calls a tensor keeps, one after the other."""
    origin = tensor._shard_state.origin
    if origin.call is None:
        return 0
    return 1 + max((calls(t) for t in origin.call.sharded if t._unit_ref is None), default=0)


@dataclasses.dataclass
class Snapshot:
    """As pytorch/examples' minGPT has it: ``dataclasses.asdict`` makes deep copies of what rank 0 alone saves."""

    model: dict[str, Any]
    optimizer: dict[str, Any]


@ranks(2)
def test_deep_copies_of_state_dicts_are_saved_by_one_rank(rank: int) -> None:
    sharded, engine, plain = made(alone_after=0.1)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (sharded, plain)]

    def step() -> None:
        for model, optimizer in zip((sharded, plain), optimizers, strict=True):
            model(batch()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for reader in (0, 1):
        step()
        if rank == reader:
            both = zip((sharded, plain), optimizers, strict=True)
            found, expected = (saved(dataclasses.asdict(Snapshot(m.state_dict(), o.state_dict()))) for m, o in both)
            same(found, expected)
    kept = copy.deepcopy(optimizers[0].state_dict())["state"][1]
    kept["exp_avg"].mul_(2)
    with pytest.raises(ShardPicklingError):  # the copy has changed
        saved(kept["exp_avg"])
    step()
    with pytest.raises(ShardPicklingError):  # the state has changed
        saved(kept["exp_avg_sq"])
    same(engine.state_dict(rank0_only=False), plain.state_dict())


@pytest.mark.parametrize("alone", [True, False])
@ranks(2)
def test_a_converted_model_is_saved_and_not_run(rank: int, alone: bool) -> None:
    """As scripts that train adapters end: ``model.to(torch.float32)`` of frozen 16-bit weights on the main process."""
    sharded, engine, plain = made(torch.bfloat16, alone_after=0.1)
    plain.load_state_dict(engine.state_dict(rank0_only=False))
    if rank == 0 or not alone:
        for model in (sharded, plain):
            model.to(torch.float32)
        assert sharded.first.weight.dtype == torch.float32
        same(saved(sharded.state_dict()), plain.state_dict())
        same(sharded.first.weight.norm(), plain.first.weight.norm())
        with pytest.raises(ReplacedParameterError, match=r"'scale'.*convert layers before"), torch.no_grad():
            sharded(batch())
    if not alone:
        same(engine.state_dict(rank0_only=False), plain.state_dict())
    dist.barrier()


@ranks(2)
def test_a_converted_model_is_given_back_by_close(rank: int) -> None:
    sharded, engine, plain = made(torch.bfloat16)
    plain.load_state_dict(engine.state_dict(rank0_only=False))
    for model in (sharded, plain):
        model.to(torch.float32)
    engine.close()
    same(sharded.state_dict(), plain.state_dict())
    same(sharded(batch()), plain(batch()))
