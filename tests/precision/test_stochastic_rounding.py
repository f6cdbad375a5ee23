"""Steps of bf16 parameters are rounded stochastically: right on average, the same wherever they should be, and never silently
in bf16."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, whole
from tests.marks import exhaustive
from tests.precision.harness import same_bits
from tests.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import ConfigError, ShardError
from torch_shard.flat_piece import RoundedPiece
from torch_shard.rounding import Rounding, noise, round_to

BF16, FP32 = torch.bfloat16, torch.float32
ROUND = Precision(stochastic_rounding=True)
O = torch.optim


# -- the rounding itself --------------------------------------------------------------------------------------------------
def rounded(exact: torch.Tensor, start: int = 0, count: int = 0) -> torch.Tensor:
    rounding = Rounding(1, (0, 0))
    for _ in range(count):
        rounding.begin()
    values = torch.empty(exact.numel(), dtype=BF16, device=exact.device)
    round_to([values], exact, [rounding.at(start)])
    return values


def neighbours(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of bf16 next to each, toward zero and away from it."""
    bits = exact.view(torch.int32)
    down = bits & ~0xFFFF
    return down.view(FP32), torch.where(bits == down, down, down + 0x10000).view(FP32)


@pytest.mark.parametrize("fraction", [2**-16, 0.01, 0.5, *exhaustive(0.25, 0.9, 1 - 2**-16)])
@pytest.mark.parametrize("base", [1.0, -1.5e20, 2**-130, *exhaustive(-1.0, 3.0e-5)])
def test_the_mean_of_many_roundings_is_the_value(base: float, fraction: float, device: str):
    n = 1 << 20
    low = torch.tensor(base).bfloat16().float()
    bits = int(fraction * 65536)
    value = (low.view(torch.int32) + bits).view(FP32)
    down, up = neighbours(value)
    found = rounded(value.expand(n).contiguous().to(device)).cpu().float()
    assert ((found == down) | (found == up)).all()
    p = bits / 65536
    share = (found == up).double().mean().item()
    assert abs(share - p) < 5 * (p * (1 - p) / n) ** 0.5


def test_what_bf16_has_is_kept(device: str):
    """Every finite value, subnormal ones and both zeros among them, and the infinities."""
    every = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.int16).view(BF16)
    every = every[~every.isnan()]
    for count in range(3):
        assert torch.equal(rounded(every.float(), count=count).view(torch.int16), every.view(torch.int16))


def test_nan_stays_nan_whatever_its_bits_are(device: str):
    bits = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001 - (1 << 32), -1]
    nans = torch.tensor(bits, dtype=torch.int32).repeat(1000).view(FP32).to(device)
    assert rounded(nans).isnan().all()


def test_nothing_becomes_infinite_that_rounding_to_nearest_leaves_finite(device: str):
    largest = torch.finfo(BF16).max
    top = torch.tensor([largest]).view(torch.int32)
    # Below the largest value, at it, and beyond it on both sides of the middle to the next power of two.
    offsets = torch.tensor([-0x8000, -1, 0, 1, 0x7FFF, 0x8000, 0xFFFF], dtype=torch.int32)
    values = (top + offsets).view(FP32).repeat_interleave(2000).to(device)
    for sign in (1, -1):
        found, nearest = rounded(sign * values), (sign * values).to(BF16)
        assert torch.equal(found.isinf(), nearest.isinf())
        beyond = values > largest
        assert torch.equal(found[beyond], nearest[beyond])
    assert (values.to(BF16).isinf()).any() and (values > largest).any()


def test_random_numbers_are_a_function_of_key_and_place(device: str):
    rounding, cuda_or_cpu = Rounding(7, (2, 1)), torch.device(device)
    all_of_them = noise([(rounding.at(0), 3000)], cuda_or_cpu)
    assert torch.equal(all_of_them.cpu(), noise([(rounding.at(0), 3000)], torch.device("cpu")))
    parts = [(3, 100), (1000, 7), (17, 0), (1001, 6), (2000, 1000)]
    found = noise([(rounding.at(start), length) for start, length in parts], cuda_or_cpu)
    assert torch.equal(found, torch.cat([all_of_them[start : start + length] for start, length in parts]))
    for other in (Rounding(8, (2, 1)), Rounding(7, (1, 1)), Rounding(7, (2, 0))):
        assert (noise([(other.at(0), 3000)], cuda_or_cpu) == all_of_them).float().mean() < 0.01
    rounding.begin()
    assert (noise([(rounding.at(0), 3000)], cuda_or_cpu) == all_of_them).float().mean() < 0.01


def test_neighbours_and_steps_are_not_correlated():
    n, rounding = 1 << 18, Rounding(0, (0, 0))
    steps = []
    for _ in range(3):
        steps.append(noise([(rounding.at(0), n)], torch.device("cpu")).double() / 2**15)
        rounding.begin()
    limit = 5 / n**0.5 / 3  # of the mean of a product of two, whose variances are 1/3
    for x in steps:
        assert abs(x.mean()) < 5 / (3 * n) ** 0.5 and abs(x.pow(2).mean() - 1 / 3) < 5 * (4 / 45 / n) ** 0.5
        for lag in (1, 2, 3, 4, 5, 64, 1024):
            assert abs((x[lag:] * x[:-lag]).mean()) < limit * 1.1
    assert abs((steps[0] * steps[1]).mean()) < limit and abs((steps[1] * steps[2]).mean()) < limit


# -- steps ----------------------------------------------------------------------------------------------------------------
class Flat(nn.Module):
    """Whose gradients are exactly `slope`, and which knows only parameters of one value."""

    def __init__(self, numel: int, slope: float = 1.0) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.ones(numel, dtype=BF16)), slope

    def forward(self) -> torch.Tensor:
        return self.weight.sum() * self.slope


def small_steps(numel: int, steps: int, precision: Any, make: Callable[..., Any], **settings: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = Flat(numel)
    engine = torch_shard.shard(model, precision=precision, **settings)
    optimizer = make(model.parameters())
    for _ in range(steps):
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = model.weight.detach().full_tensor()
    engine.close(optimizer)
    return found


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
def test_updates_far_below_the_resolution_add_up(strategy, rank):
    """20 steps of 1e-4 from 1, where the next values are 0.004 below and 0.008 above."""
    steps, lr, n = 20, 1e-4, 40000
    sgd = functools.partial(O.SGD, lr=lr)
    found = small_steps(n, steps, ROUND, sgd, strategy=strategy).double()
    ulp = 2**-8
    sd = ulp * (steps * lr / ulp / n) ** 0.5  # a binomial's, at most
    assert abs(found.mean().item() - (1 - steps * lr)) < 5 * sd
    assert 0.3 < (found < 1).double().mean() < 0.7
    nearest = small_steps(n, steps, None, sgd, strategy=strategy)
    assert (nearest == 1).all()


def mlp() -> nn.Module:
    return MLP(width=11).to(BF16)


def train(
    rank: int,
    make: Callable[[nn.Module], Any],
    steps: int = 4,
    *,
    build: Callable[[], nn.Module] = mlp,
    seed: int = 0,
    alike: bool = False,
    **settings: Any,
) -> tuple[nn.Module, Any, Any]:
    """Train a bf16 model. Returns it, its engine and its optimizer. `alike`: all ranks have the same batches."""
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(seed)
    engine = torch_shard.shard(model, **{"unit_bytes": 300, "timeout": 20.0, "precision": ROUND, **settings})
    optimizer = make(model)
    go(model, optimizer, 0 if alike else rank, range(steps))
    return model, engine, optimizer


def go(model: nn.Module, optimizer: Any, rank: int, steps: Any) -> None:
    for step in steps:
        loss_of(model(batch(rank, step).to(BF16))).backward()
        optimizer.step()
        optimizer.zero_grad()


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def same_values(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(ours[name].view(torch.int16), value.view(torch.int16)) for name, value in theirs.items())


def adamw(model: nn.Module) -> Any:
    return O.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> Any:
    return O.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Exact:
    """Plain parameters in fp32 beside a bf16 model's. Each step begins with the model's values and gradients, so that it shows
    how the model's step should come out before it is rounded."""

    def __init__(self, model: nn.Module, make: Callable[[nn.Module], Any]) -> None:
        self.model = model
        self.plain = nn.Module()
        for name, p in model.named_parameters():
            self.plain.register_parameter(name.replace(".", "/"), nn.Parameter(whole(p).float()))
        self.optimizer = make(self.plain)

    def step(self, optimizer: Any) -> None:
        """Step both, and compare values and state. Collective."""
        with torch.no_grad():
            for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
                q.copy_(whole(p))
                q.grad = None if p.grad is None else whole(p.grad).float()
        self.optimizer.step()
        optimizer.step()
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            found, exact = whole(p), q.detach()
            assert found.dtype == BF16
            # Arithmetic in another order may end on another side of a value that bf16 has.
            near = exact * (1 + torch.tensor([[-1e-6], [1e-6]]).view(2, *[1] * exact.dim()))
            low = torch.minimum(*neighbours(near.min(0).values.contiguous()))
            high = torch.maximum(*neighbours(near.max(0).values.contiguous()))
            assert ((found.float() >= low) & (found.float() <= high)).all(), name
            for key, value in self.optimizer.state.get(q, {}).items():
                ours = optimizer.state[p][key]
                if isinstance(value, torch.Tensor):
                    assert ours.dtype == value.dtype, (name, key, ours.dtype)
                    torch.testing.assert_close(whole(ours), value, rtol=1e-5, atol=1e-7, msg=f"{key} of {name}")


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": sgd,
    "AdamW": adamw,
    "AdamW foreach": lambda m: O.AdamW(m.parameters(), lr=1e-3, foreach=True),
    "AdamW for-loop": lambda m: O.AdamW(m.parameters(), lr=1e-3, foreach=False, fused=False),
    "Adam fused": lambda m: O.Adam(m.parameters(), lr=1e-3, fused=True),
    "Adagrad": lambda m: O.Adagrad(m.parameters(), lr=1e-3),
    "NAdam": lambda m: O.NAdam(m.parameters(), lr=1e-3),
    "Rprop": lambda m: O.Rprop(m.parameters(), lr=1e-3),
    "ASGD": lambda m: O.ASGD(m.parameters(), lr=1e-3),
    "Adadelta": lambda m: O.Adadelta(m.parameters(), lr=1e-1),
}


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("name", ["AdamW", "SGD", *exhaustive(*[n for n in MAKE if n not in ("AdamW", "SGD")])])
def test_steps_are_those_of_fp32_but_for_the_last_rounding(name, strategy, rank):
    model, _, optimizer = train(rank, MAKE[name], 0, strategy=strategy)
    exact = Exact(model, MAKE[name])
    before = wholes(model)
    for step in range(4):
        loss_of(model(batch(rank, step).to(BF16))).backward()
        exact.step(optimizer)
        optimizer.zero_grad()
    assert not same_values(wholes(model), before)


@ranks(2)
def test_parameters_without_a_gradient_in_a_step_are_left_alone(rank):
    """Their counters differ from the others' afterwards, so they are stepped by themselves."""
    model, _, optimizer = train(rank, adamw, 0)
    exact = Exact(model, adamw)
    for step in range(4):
        loss_of(model(batch(rank, step).to(BF16))).backward()
        if step % 2:
            model.inp.bias.grad = model.blocks[1].up.weight.grad = None
        before = whole(model.blocks[1].up.weight)
        exact.step(optimizer)
        if step % 2:
            same_bits(model.blocks[1].up.weight, before)
        optimizer.zero_grad()


class Whole2D(nn.Module):
    """Matrices only, which Muon takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(n, m, bias=False) for n, m in ((5, 12), (12, 9), (9, 3))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("kind", [O.Muon, *exhaustive(O.Adafactor)])
def test_optimizers_of_whole_matrices_step_in_fp32_too(kind, rank):
    make = functools.partial(_of_kind, kind)
    model, engine, optimizer = train(rank, make, 0, build=lambda: Whole2D().to(BF16))
    before = wholes(model)
    for step in range(3):
        loss_of(model(batch(rank, step).to(BF16))).backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        plain = {name: value.float().requires_grad_() for name, value in wholes(model).items()}
        # State lives at the owners, and is compared as a whole.
        reference = kind(list(plain.values()), lr=1e-2)
        state = engine.optim_state_dict(optimizer, rank0_only=False)
        for name, p in plain.items():
            p.grad = grads[name].float()
            if name in state["state"]:
                reference.state[p] = {k: copy.deepcopy(v) for k, v in state["state"][name].items()}
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        after = engine.optim_state_dict(optimizer, rank0_only=False)["state"]
        for name, p in model.named_parameters():
            low, high = neighbours(plain[name].detach())
            found = whole(p).float()
            assert ((found == low) | (found == high)).all(), name
            for key, value in reference.state[plain[name]].items():
                same_bits(after[name][key], value, f"{key} of {name}")
    assert not same_values(wholes(model), before)


def _of_kind(kind: type, model: nn.Module) -> Any:
    return kind(list(model.parameters()), lr=1e-2)


# -- which random numbers -------------------------------------------------------------------------------------------------
@ranks(2)
def test_the_seed_of_the_first_rank_decides(rank):
    runs = [wholes(train(rank, adamw, seed=seed)[0]) for seed in (3, 3 + 5 * rank, 4)]
    assert same_values(runs[0], runs[1])  # the other rank's own seed is not asked for
    assert not same_values(runs[0], runs[2])


@ranks(2, exhaustive=(4,))
def test_replicas_stay_equal_to_the_bit(rank, world_size):
    model, _, _ = train(rank, adamw, 6, strategy="no_shard")
    for name, p in model.named_parameters():
        own = p.to_local().view(torch.int16).clone()
        first = own.clone()
        dist.broadcast(first.view(torch.uint8), 0)
        assert torch.equal(own, first), name


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("make", [sgd, *exhaustive(adamw)])
def test_shards_are_rounded_as_the_whole_is(make, rank):
    """With equal gradients the strategy does not show in the numbers, so ranks with different slices draw different ones."""
    sharded = wholes(train(rank, make, alike=True)[0])
    replicated = wholes(train(rank, make, alike=True, strategy="no_shard")[0])
    assert same_values(sharded, replicated)


@ranks(1)
def test_how_a_step_is_divided_does_not_show(rank):
    """Into pieces of 131072 elements, or of a million."""
    n = (1 << 20) + 1000
    ways: list[dict[str, Any]] = [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}]
    runs = [small_steps(n, 3, ROUND, functools.partial(O.SGD, lr=1e-3, **way)) for way in ways]
    assert (runs[0] != 1).any()
    for run in runs[1:]:
        same_bits(run, runs[0])
    pieces = runs[0][: 1 << 20].view(8, -1)
    assert all((pieces[i] != pieces[j]).any() for i in range(8) for j in range(i))


@ranks(2)
def test_stepping_in_backward_gives_the_same_numbers(rank):
    usual = wholes(train(rank, adamw)[0])
    model, engine, optimizer = train(rank, adamw, 0)
    engine.step_in_backward(optimizer)
    for step in range(4):
        loss_of(model(batch(rank, step).to(BF16))).backward()
    assert same_values(wholes(model), usual)


@ranks(2)
def test_different_elements_and_steps_are_rounded_differently(rank):
    found = small_steps(4096, 8, ROUND, functools.partial(O.SGD, lr=2**-10))
    ours, theirs = found[:2048], found[2048:]  # of the two ranks
    assert (ours != theirs).float().mean() > 0.1
    assert len(found.unique()) > 2


@ranks(2)
def test_the_users_random_numbers_are_not_touched(rank):
    torch.manual_seed(5)
    model = mlp()
    state = torch.get_rng_state()
    torch_shard.shard(model, unit_bytes=300, precision=ROUND)
    go(model, sgd(model), rank, range(2))
    assert torch.equal(torch.get_rng_state(), state)


@ranks(2)
def test_a_copy_of_the_model_goes_on_alike(rank):
    model, _, optimizer = train(rank, lambda m: O.SGD(m.parameters(), lr=0.05))
    twin = copy.deepcopy(model)
    go(model, optimizer, rank, range(4, 6))
    go(twin, O.SGD(twin.parameters(), lr=0.05), rank, range(4, 6))
    assert same_values(wholes(model), wholes(twin))


# -- state ----------------------------------------------------------------------------------------------------------------
def moments(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": whole(value).clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def same_moments(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == FP32
        same_bits(ours[name], value, name)


def _by_torch(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    saved = copy.deepcopy(optimizer.state_dict())
    return lambda engine, optimizer: optimizer.load_state_dict(saved)


def _by_name(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    saved = engine.optim_state_dict(optimizer, rank0_only=False)
    return lambda engine, optimizer: engine.load_optim_state_dict(optimizer, saved)


def _by_checkpoint(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    engine.save(path / "sharded", optimizer)
    return lambda engine, optimizer: engine.load(path / "sharded", optimizer)


def _by_full_checkpoint(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    engine.save_full(path / "full.pt", optimizer)
    dist.barrier()
    return lambda engine, optimizer: engine.load(path / "full.pt", optimizer)


@ranks(2)
@pytest.mark.parametrize("way", [_by_torch, _by_name, _by_checkpoint, _by_full_checkpoint])
@pytest.mark.parametrize("used", [False, *exhaustive(True)])
def test_saved_state_comes_back_in_fp32(way, used, rank, tmp_path):
    """Into an optimizer that has stepped before, or has not."""
    model, engine, optimizer = train(rank, adamw)
    load, kept = way(engine, optimizer, tmp_path), moments(model, optimizer)
    other, engine, optimizer = train(rank, adamw, 2 if used else 0)
    load(engine, optimizer)
    same_moments(moments(other, optimizer), kept)
    go(other, optimizer, rank, range(1))
    assert all(value.dtype == FP32 for value in moments(other, optimizer).values())


@ranks(2)
def test_state_of_whole_matrices_comes_back_in_fp32_by_torchs_own_dict(rank):
    make = functools.partial(_of_kind, O.Muon)
    _, engine, optimizer = train(rank, make, build=lambda: Whole2D().to(BF16))
    kept = engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, entries in engine.optim_state_dict(optimizer, rank0_only=False)["state"].items():
        for key, value in entries.items():
            assert value.dtype == FP32
            same_bits(value, kept[name][key], name)


@ranks(2)
def test_state_of_steps_in_bf16_becomes_fp32_at_the_first_step(rank):
    """From a training without rounding; exactly, so that one more step is that of fp32."""
    model, engine, optimizer = train(rank, adamw, 2, precision=None)
    saved = engine.optim_state_dict(optimizer, rank0_only=False)
    assert {v.dtype for v in saved["state"]["inp.weight"].values() if v.dim()} == {BF16}
    values = wholes(model)
    model, engine, optimizer = train(rank, adamw, 0)
    engine.load_state_dict(values)
    engine.load_optim_state_dict(optimizer, saved)
    exact = Exact(model, adamw)
    for name, q in exact.plain.named_parameters():
        own = saved["state"][name.replace("/", ".")]
        exact.optimizer.state[q] = {k: v.float().clone() for k, v in own.items()}
    loss_of(model(batch(rank, 2).to(BF16))).backward()
    exact.step(optimizer)


@ranks(2)
def test_a_resumed_training_begins_with_new_random_numbers(rank, tmp_path):
    """They are not in checkpoints: two continuations are equal to each other, but not to an uninterrupted training."""
    model, engine, optimizer = train(rank, sgd, 3)
    engine.save(tmp_path / "checkpoint", optimizer)
    go(model, optimizer, rank, range(3, 5))
    resumed = []
    for _ in range(2):
        other, engine, optimizer = train(rank, sgd, 0)
        engine.load(tmp_path / "checkpoint", optimizer)
        go(other, optimizer, rank, range(3, 5))
        resumed.append(wholes(other))
    assert same_values(*resumed) and not same_values(resumed[0], wholes(model))


# -- masters, declared classes, memory ---------------------------------------------------------------------------------------
@ranks(2)
@pytest.mark.parametrize("compute", [None, BF16])
def test_fp32_models_may_have_bf16_masters(compute, rank):
    """Computed with in fp32 or as they are stored."""
    precision = Precision(master_dtype=BF16, param_dtype=compute, stochastic_rounding=True)
    model, _, optimizer = train(rank, adamw, 0, build=lambda: MLP(width=11), precision=precision)
    exact = Exact(model, adamw)
    for step in range(3):
        loss_of(model(batch(rank, step).to(compute or FP32))).backward()
        exact.step(optimizer)
        optimizer.zero_grad()


@ranks(2)
def test_gradients_may_come_to_the_step_in_fp32(rank, world_size):
    """As they were reduced: what bf16 would round away counts."""
    precision = Precision(reduce_dtype=FP32, keep_low_precision_grads=True, stochastic_rounding=True)
    model = Flat(64)
    torch_shard.shard(model, precision=precision)
    optimizer = O.SGD(model.parameters(), lr=1.0, momentum=0.9)
    ((1 + 2.0**-6 * rank) * model()).backward()  # mean 1 + 2**-7, and in bf16 sums are rounded
    ((2.0**-10) * model()).backward()
    exact = 1 + 2**-7 + 2**-10
    assert model.weight.grad.dtype == FP32 and (whole(model.weight.grad) == exact).all()
    optimizer.step()
    assert (whole(optimizer.state[model.weight]["momentum_buffer"]) == exact).all()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(5, 7, dtype=BF16), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.to(BF16)).float())


@ranks(2)
def test_parameters_in_fp32_step_as_without_rounding(rank):
    torch.manual_seed(0)
    model = Two()
    torch_shard.shard(model, precision=ROUND)
    optimizer = adamw(model)
    plain = {n: nn.Parameter(whole(p)) for n, p in model.high.named_parameters()}
    reference = O.AdamW(plain.values(), lr=1e-3)
    for step in range(3):
        loss_of(model(batch(rank, step))).backward()
        for name, p in plain.items():
            p.grad = whole(model.high.get_parameter(name).grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for name, p in plain.items():
            torch.testing.assert_close(whole(model.high.get_parameter(name)), p.detach(), rtol=1e-6, atol=1e-7)
    assert model.low.weight.dtype == BF16 and optimizer.state[model.low.weight]["exp_avg"].dtype == FP32


class Halving(O.Optimizer):
    """SGD of a user's own, in two loops, which takes the gradient away."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        held = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in held:
            assert p.dtype == p.grad.dtype == FP32
            p.add_(p.grad, alpha=-group["lr"] / 2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / 2)
                    p.grad.mul_(2)
        return loss


@ranks(2)
def test_declared_classes_find_fp32_and_round_once(rank):
    """Once for the whole step: halves of an update that bf16 has give exactly that update."""
    torch_shard.optim.register(Halving, kind="elementwise")
    model = Flat(1000)
    torch_shard.shard(model, precision=ROUND)
    optimizer = Halving(model.parameters(), lr=2**-8)
    model().backward()
    optimizer.step()
    assert (whole(model.weight) == 1 - 2**-8).all()
    assert (whole(model.weight.grad) == 2).all() and model.weight.grad.dtype == BF16
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (whole(model.weight) == 1 - 2**-7).all()


@ranks(2)
def test_only_a_part_of_the_shard_is_in_fp32_at_a_time(rank):
    """No more than a million elements on the CPU, whatever the model's size."""
    model = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(4)]).to(BF16)
    torch_shard.shard(model, units=["0", "1", "2", "3"], precision=ROUND)
    entered: dict[int, int] = {}
    most = [0, 0]
    enter, drop = RoundedPiece.enter, RoundedPiece.drop

    def entering(piece: RoundedPiece) -> None:
        enter(piece)
        entered[id(piece)] = piece.param.numel()
        most[0] = max(most[0], sum(entered.values()))

    def dropping(piece: RoundedPiece) -> None:
        most[1] += entered.pop(id(piece), 0)
        drop(piece)
        assert piece.param.untyped_storage().nbytes() == 4 and piece.param.grad is None

    RoundedPiece.enter, RoundedPiece.drop = entering, dropping  # type: ignore[method-assign]
    try:
        for make in (adamw, lambda m: O.AdamW(m.parameters(), foreach=True), lambda m: O.NAdam(m.parameters())):
            most[:] = [0, 0]
            go_once(model, make(model))
            assert 0 < most[0] <= 1 << 20 and most[1] == 4 * 1500 * 1500 // 2 and not entered
    finally:
        RoundedPiece.enter, RoundedPiece.drop = enter, drop  # type: ignore[method-assign]


def go_once(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, 1500, dtype=BF16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_closing_gives_bf16_parameters_back(rank):
    model, engine, optimizer = train(rank, adamw)
    values = wholes(model)
    engine.close(optimizer)
    assert {p.dtype for p in model.parameters()} == {BF16} and same_values(wholes(model), values)


# -- what is refused --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [1, "bf16", None])
def test_a_wrong_value_names_the_field(value: Any):
    with pytest.raises(ConfigError, match=r"^precision\.stochastic_rounding"):
        Precision(stochastic_rounding=value)


@ranks(2)
@pytest.mark.parametrize("precision", [ROUND, Precision(BF16, stochastic_rounding=True)])
def test_without_anything_stored_in_bf16_it_is_an_error_and_the_model_stays_plain(precision, rank):
    model = MLP()
    with pytest.raises(ConfigError, match=r"precision\.stochastic_rounding: .*float32"):
        torch_shard.shard(model, precision=precision)
    assert torch_shard.engine_of(model) is None and type(model.head.weight) is nn.Parameter
    low = mlp()
    with pytest.raises(ConfigError, match=r"precision\.stochastic_rounding: .*float32"):
        torch_shard.shard(low, precision=Precision(master_dtype=FP32, stochastic_rounding=True))


class Unknown(O.AdamW):
    """Steps by itself, on what it is given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])


@ranks(2)
def test_an_optimizer_that_steps_on_sharded_tensors_is_refused_before_anything_has_changed(rank):
    model, _, optimizer = train(rank, lambda m: Unknown(m.parameters()), 0)
    before = wholes(model)
    loss_of(model(batch(rank, 0).to(BF16))).backward()
    with pytest.raises(ConfigError, match=r"stochastic_rounding with Unknown.*inp\.weight.*register\(Unknown"):
        optimizer.step()
    assert same_values(wholes(model), before)


@ranks(2)
def test_a_parameter_that_is_listed_twice_is_refused_before_anything_has_changed(rank):
    model, _, _ = train(rank, adamw, 0)
    before = wholes(model)
    bias = model.inp.bias
    optimizer = O.SGD([{"params": list(model.parameters())}], lr=1.0)
    optimizer.param_groups[0]["params"].append(bias)
    loss_of(model(batch(rank, 0).to(BF16))).backward()
    with pytest.raises(ConfigError, match=r"SGD lists inp\.bias more than once"):
        optimizer.step()
    assert same_values(wholes(model), before)


class Failing(O.SGD):
    """Fails in the second group."""

    def _init_group(self, group: Any, *lists: Any) -> Any:
        if group.get("fails"):
            raise ArithmeticError("on purpose")
        return super()._init_group(group, *lists)


@ranks(2)
def test_a_step_that_fails_half_way_leaves_rounded_values_and_the_next_one_is_whole(rank):
    torch_shard.optim.register(Failing, kind="elementwise")
    model, _, _ = train(rank, adamw, 0)
    parameters = list(model.parameters())
    optimizer = Failing([{"params": parameters[:4]}, {"params": parameters[4:], "fails": True}], lr=0.5)
    before = wholes(model)
    loss_of(model(batch(rank, 0).to(BF16))).backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    after = wholes(model)
    names = list(after)
    assert not torch.equal(after[names[0]], before[names[0]]) and torch.equal(after[names[-1]], before[names[-1]])
    optimizer.param_groups[1]["fails"] = False
    optimizer.step()
    assert not torch.equal(wholes(model)[names[-1]], before[names[-1]])


@ranks(2)
def test_a_step_inside_gathered_is_refused_as_ever(rank):
    model, engine, optimizer = train(rank, adamw, 1)
    loss_of(model(batch(rank, 1).to(BF16))).backward()
    with engine.gathered(), pytest.raises(ShardError, match="inside engine"):
        optimizer.step()
    optimizer.step()


# -- a whole training -------------------------------------------------------------------------------------------------------
def curve(rank: int, precision: Any, steps: int = 200) -> torch.Tensor:
    """Losses of a regression whose updates are soon below the resolution of bf16."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(BF16)
    torch_shard.shard(model, unit_bytes=2000, precision=precision)
    optimizer = O.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    found = []
    for step in range(steps):
        x = batch(rank, step, 64, 16).float()
        loss = nn.functional.mse_loss(model(x.to(BF16)).float(), teacher(x).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        found.append(mean)
    return torch.stack(found)


@pytest.mark.exhaustive
@ranks(2, timeout=120)
def test_a_training_is_nearer_to_one_with_fp32_masters_than_without_rounding(rank):
    masters = curve(rank, Precision(master_dtype=FP32))
    rounding, nearest = curve(rank, ROUND), curve(rank, None)
    assert masters[-50:].mean() < 0.8 * masters[:10].mean()  # it learns
    ours, theirs = ((run - masters)[-100:].abs().mean() for run in (rounding, nearest))
    assert ours < 0.5 * theirs, (ours, theirs)


@ranks(2)
@pytest.mark.parametrize("make", [adamw, *exhaustive(sgd)])
def test_state_that_is_reset_between_steps_is_fp32_again(make, rank):
    torch.manual_seed(0)
    model = mlp().bfloat16()
    torch_shard.shard(model, precision=ROUND)
    optimizer = make(model)
    go(model, optimizer, rank, range(2))
    for p in model.parameters():
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor) and value.dim():
                optimizer.state[p][key] = torch.zeros_like(p)
    go(model, optimizer, rank, range(2, 4))
    found = {v.dtype for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, torch.Tensor)}
    assert found <= {FP32}


@ranks(2)
def test_state_made_before_the_first_step_takes_what_was_saved(rank, tmp_path):
    """Adagrad makes it in its constructor, in the dtype of the parameters."""

    def made(seed: int) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(seed)
        model = mlp().bfloat16()
        engine = torch_shard.shard(model, precision=ROUND)
        return model, engine, O.Adagrad(model.parameters(), lr=0.01)

    model, engine, optimizer = made(0)
    go(model, optimizer, rank, range(3))
    engine.save(tmp_path / "c", optimizer)
    again, other, resumed = made(1)
    other.load(tmp_path / "c", resumed)
    same_moments(moments(again, resumed), moments(model, optimizer))
    for p in again.parameters():
        assert resumed.state[p]["sum"].dtype == FP32


@ranks(2)
def test_a_scaled_loss_is_refused(rank):
    torch.manual_seed(0)
    model = mlp().bfloat16()
    torch_shard.shard(model, precision=ROUND)
    with pytest.raises(ConfigError, match="scaled by a GradScaler"):
        torch.amp.GradScaler("cpu").scale(loss_of(model(batch(rank, 0).bfloat16()))).backward()
