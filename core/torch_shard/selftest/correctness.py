"""Correctness: sharded training ends with the losses and parameters of plain training on the same data."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..activation_checkpointing import checkpointed_layers
from ..config.precision import Precision, has_bf16
from ..config.shard_config import Strategy
from ..engine import Engine, shard
from .context import Case, Context, Setting
from .devices import stall
from .model import SMALL, Block, batch, make, mean_loss
from .plain import Recipe, Trained, distance, optimizer_of, train_plainly
from .ranks import PATIENCE
from .results import NO_BF16, Result, skipped, within

_PRECISIONS = {
    "fp32": None,
    "bf16 reduced in fp32": Precision(torch.bfloat16, torch.float32),
    "bf16": Precision(torch.bfloat16),
}
# Of a training's change, see `distance`. A bf16 sum in another order is a rounding error of 2^-8. A gradient of twice its size is
# an error of about 1 (`doubled` in the figures); a comparison that could not tell fails.
TOLERANCES = {"fp32": 1e-3, "bf16 reduced in fp32": 0.05, "bf16": 0.1}


@dataclass(frozen=True)
class Sharded:
    """The settings of sharded training that the plain training it is compared with does not have.

    Attributes:
        strategy, precision: the engine's settings, `precision` as a name of :data:`_PRECISIONS`.
        deferred: accumulate under ``no_sync``, so that gradients are reduced once in each step.
        recomputes: recompute the blocks' activations in backward.
        restarts: go half-way to a new model that loads a checkpoint of the first one.
        between: a function that is called after each block, see :class:`~torch_shard.selftest.model.Decoder`.
    """

    strategy: str = "full_shard"
    precision: str = "fp32"
    deferred: bool = True
    recomputes: bool = False
    restarts: bool = False
    between: Callable[[Tensor], Tensor] | None = None


def correctness_cases(setting: Setting) -> list[Case]:
    """Return the cases of the part: strategies times precisions times optimizers, then the features of a training loop."""
    cases = []
    for strategy in (each for each in get_args(Strategy) if each != "auto"):  # which is one of the others
        why_not = _why_not(strategy, setting)
        for precision in _PRECISIONS:
            for optimizer in ("SGD", "AdamW"):
                recipe = Recipe(optimizer, torch.float32 if precision == "fp32" else torch.bfloat16)
                run = functools.partial(_compare, Sharded(strategy, precision), recipe)
                cases.append(Case("correctness", f"{strategy}, {precision}, {optimizer}", run, why_not))
        for name, sharded, recipe in _features(strategy):
            if strategy == "full_shard" or not setting.quick:
                run = functools.partial(_compare, sharded, recipe)
                cases.append(Case("correctness", f"{strategy}, {name}", run, why_not))
    return cases


def _features(strategy: str) -> Iterator[tuple[str, Sharded, Recipe]]:
    usual = Sharded(strategy)
    yield "gradient accumulation under no_sync", usual, Recipe(micro=3)
    yield "gradient accumulation, each reduced", dataclasses.replace(usual, deferred=False), Recipe(micro=3)
    yield "gradient clipping", usual, Recipe(max_norm=0.1)
    yield "activation checkpointing", dataclasses.replace(usual, recomputes=True), Recipe()
    for optimizer in ("SGD", "AdamW"):
        yield f"checkpoint, {optimizer}", dataclasses.replace(usual, restarts=True), Recipe(optimizer)


def _why_not(strategy: str, setting: Setting) -> str:
    if strategy.startswith("hybrid") and (setting.ranks < 4 or setting.ranks % 2):
        return f"two replicas of two shards or more need an even number of ranks, 4 at least; there are {setting.ranks}"
    return ""


def stream_cases(setting: Setting) -> list[Case]:
    """Return cases in which a missing wait between streams shows as other numbers, and those under torch's sanitizer."""
    why_not = "" if setting.kind == "cuda" else "the CPU has no streams: each call returns when its work has ended"
    cases = []
    for strategy in ("full_shard", "shard_grad_op", "shard_optim", "no_shard"):
        run = functools.partial(_compare, Sharded(strategy, between=_Late.apply), Recipe())
        cases.append(Case("streams", f"{strategy}, the host far ahead of the device", run, why_not))
    for strategy in ("full_shard", "shard_grad_op"):
        run = functools.partial(_compare, Sharded(strategy), Recipe(steps=3))
        name = f"{strategy}, under torch's CUDA sanitizer"
        cases.append(Case("streams", name, run, why_not or setting.no_sanitizer, sanitized=True))
    return cases


class _Late(torch.autograd.Function):
    """A function that keeps the device busy in forward and in backward, so that whatever does not wait for it comes too early."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        stall(x.device)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        stall(grad.device)
        return grad


def _compare(sharded: Sharded, recipe: Recipe, context: Context, case: Case) -> list[Result]:
    device, world = context.ranks.device, context.ranks.world
    if sharded.precision != "fp32" and not has_bf16(device):
        return [skipped(case.part, case.name, NO_BF16)]
    plain = train_plainly(recipe, device, world)
    summed = dataclasses.replace(recipe, gradient_scale=2.0)  # as a sum over two ranks in place of a mean
    wrong = distance(train_plainly(summed, device, world), plain)
    doubled = wrong["update" if recipe.max_norm is None else "norm"]  # clipping takes the scale out of the update
    errors = distance(train_sharded(sharded, recipe, context), plain)
    tolerance = TOLERANCES[sharded.precision]
    worst = max(context.ranks.gather(max(errors.values())))
    if doubled < 2 * tolerance:
        reason = f"the comparison can't tell: gradients of twice their size would be measured as {doubled:.3g}"
        return [Result(case.part, case.name, "failed", worst, 0.0, tolerance, reason=reason)]
    return [within(case.part, case.name, worst, 0.0, tolerance, "", **errors, doubled=doubled)]


def train_sharded(sharded: Sharded, recipe: Recipe, context: Context) -> Trained:
    """Train the model of ``train_plainly`` under the engine, each rank on its own batches. Collective."""
    ranks = context.ranks
    model = make(SMALL, ranks.device, between=sharded.between)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine, optimizer = _prepare(sharded, recipe, model, ranks.world)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(recipe.steps):
        if sharded.restarts and step == recipe.steps // 2:
            engine.save(context.folder / "checkpoint", optimizer, extra={"step": step})
            engine.close(optimizer)
            model = make(SMALL, ranks.device, seed=1)
            engine, optimizer = _prepare(sharded, recipe, model, ranks.world)
            if engine.load(context.folder / "checkpoint", optimizer) != {"step": step}:
                raise AssertionError("the checkpoint's extra came back as something else")
        losses.append(sum(ranks.gather(_backward(engine, sharded, recipe, step, ranks.rank))) / ranks.world)
        if recipe.max_norm is not None:
            norms.append(engine.clip_grad_norm_(recipe.max_norm).item())
        else:
            norms.append(sum(norm.item() ** 2 for norm in engine.grad_norms().values()) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with engine.gathered():
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.close(optimizer)
    return Trained(losses, norms, before, after)


def _prepare(sharded: Sharded, recipe: Recipe, model: nn.Module, world: int) -> tuple[Engine, torch.optim.Optimizer]:
    settings: dict[str, Any] = {"strategy": sharded.strategy, "precision": _PRECISIONS[sharded.precision]}
    if sharded.strategy.startswith("hybrid"):
        settings["shard_size"] = world // 2
    with checkpointed_layers(model, [Block] if sharded.recomputes else False, None):
        engine = shard(model, units=[Block], timeout=PATIENCE, **settings)
    return engine, optimizer_of(recipe, model)


def _backward(engine: Engine, sharded: Sharded, recipe: Recipe, step: int, rank: int) -> float:
    """Run forward and backward of one step's micro-batches, and return this rank's mean loss."""
    total = 0.0
    for micro in range(recipe.micro):
        last = micro == recipe.micro - 1
        with contextlib.nullcontext() if last or not sharded.deferred else engine.no_sync():
            loss = mean_loss(engine.model, batch(SMALL, engine.device, step, rank, micro)) / recipe.micro
            loss.backward()
        total += loss.item()
    return total
