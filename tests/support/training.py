"""Random small trainings, run by the engine on real ranks and by the reference."""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

import torch_shard
from tests.support.reference import ReferenceEngine, adamw, sgd

OPTIMIZERS: dict[str, tuple[Any, Any]] = {"SGD": (torch.optim.SGD, sgd), "AdamW": (torch.optim.AdamW, adamw)}


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes:
        width: of all layers.
        uses: numbers of the layers in the order in which forward uses them.
        frozen: names of parameters.
        no_offset: for each layer the ranks that do not use its offset, which has no gradient there.
        units: names of the parameters of each unit.
        micro_batches: how many backwards a step has; under ``no_sync()`` up to the last where `no_sync`.
        clip: largest norm of the gradients.
        keep: do not clear gradients between steps.
    """

    width: int
    uses: tuple[int, ...]
    frozen: tuple[str, ...]
    no_offset: tuple[tuple[int, ...], ...]
    units: tuple[tuple[str, ...], ...]
    optimizer: str = "SGD"
    options: tuple[tuple[str, Any], ...] = (("lr", 0.1),)
    micro_batches: int = 1
    no_sync: bool = False
    clip: float | None = None
    keep: bool = False
    steps: int = 2
    settings: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width + 1).t())  # its memory is not in row-major order
        self.bias = nn.Parameter(torch.randn(width))
        self.offset = nn.Parameter(torch.tensor(0.25))

    def forward(self, x: torch.Tensor, uses_offset: bool) -> torch.Tensor:
        ones = torch.ones(len(x), 1, dtype=x.dtype)
        y = torch.tanh(torch.cat([x, ones], 1) @ self.weight + self.bias)
        return y + self.offset if uses_offset else y


class Layers(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.layers = nn.ModuleList([Layer(case.width) for _ in case.no_offset])
        self.double()
        for name in case.frozen:
            self.get_parameter(name).requires_grad_(False)

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for number in self.case.uses:
            x = x + self.layers[number](x, rank not in self.case.no_offset[number])
        return x


def loss_of(model: nn.Module, rank: int, case: Case, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + micro)
    x = torch.randn(3, case.width, generator=generator, dtype=torch.float64, requires_grad=True)
    return model(x, rank).pow(2).mean() / case.micro_batches


def train(rank: int, world_size: int, case: Case) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train on a rank: its part of each parameter, and the norms that clipping found."""
    model = Layers(case)
    engine = torch_shard.shard(model, units=case.units, timeout=20.0, **dict(case.settings))
    make = OPTIMIZERS[case.optimizer][0]
    optimizer = make([p for p in model.parameters() if p.requires_grad], **dict(case.options))
    norms = []
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            waits = case.no_sync and micro + 1 < case.micro_batches
            with engine.no_sync() if waits else contextlib.nullcontext():
                loss_of(model, rank, case, step, micro).backward()
        if case.clip is not None:
            norms.append(engine.clip_grad_norm_(case.clip).item())
        optimizer.step()
        if not case.keep:
            optimizer.zero_grad()
    return {name: p.to_local().clone() for name, p in model.named_parameters()}, norms


def train_reference(case: Case, ranks: int) -> tuple[ReferenceEngine, list[float]]:
    """Train as :func:`train` does."""
    reference = ReferenceEngine(Layers(case), case.units, ranks, case.replicas)
    update = functools.partial(OPTIMIZERS[case.optimizer][1], **dict(case.options))
    norms = []
    for step in range(case.steps):
        for micro in range(case.micro_batches):
            reference.backward(functools.partial(loss_of, case=case, step=step, micro=micro))
        if case.clip is not None:
            norms.append(reference.clip(case.clip))
        reference.step(update)
        if not case.keep:
            reference.zero_grad()
    return reference, norms


def same(results: list[tuple[dict[str, torch.Tensor], list[float]]], case: Case) -> None:
    """Assert that the ranks' results of :func:`train` are the reference's."""
    reference, norms = train_reference(case, len(results))
    for rank, (parts, found) in enumerate(results):
        assert all(math.isclose(norm, other, rel_tol=1e-12) for norm, other in zip(found, norms, strict=True)), rank
        torch.testing.assert_close(parts, reference.held_by(rank), rtol=1e-12, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn, ranks: int, **fixed: Any) -> Case:
    layers = draw(st.integers(1, 3))
    uses = tuple(draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=4)))
    names = [f"layers.{n}.{kind}" for n in range(layers) for kind in ("weight", "bias", "offset")]
    frozen = draw(st.sets(st.sampled_from(names[1:]), max_size=3))
    # One layer to a unit, or all in one, or the matrices apart from the rest.
    by_layer = [names[3 * n : 3 * n + 3] for n in range(layers)]
    matrices = [names[::3], [name for name in names if not name.endswith("weight")]]
    some_ranks = st.sets(st.integers(0, ranks - 1)).map(lambda ranks: tuple(sorted(ranks)))
    options = {"lr": draw(st.sampled_from([0.3, 0.01])), "weight_decay": draw(st.sampled_from([0.0, 0.2]))}
    optimizer = draw(st.sampled_from(["SGD", "AdamW"]))
    if optimizer == "SGD":
        options["momentum"] = draw(st.sampled_from([0.0, 0.9]))
    else:
        options["betas"] = draw(st.sampled_from([(0.9, 0.999), (0.5, 0.7)]))
    values: dict[str, Any] = {
        "width": draw(st.integers(1, 5)),
        "uses": uses,
        "frozen": tuple(sorted(frozen)),
        "no_offset": tuple(draw(some_ranks) for _ in range(layers)),
        "units": tuple(map(tuple, draw(st.sampled_from([by_layer, [names], matrices])))),
        "optimizer": optimizer,
        "options": tuple(options.items()),
        "micro_batches": draw(st.integers(1, 3)),
        "no_sync": draw(st.booleans()),
        "clip": draw(st.sampled_from([None, 0.05, 100.0])),
        "keep": draw(st.booleans()),
        "steps": draw(st.integers(1, 3)),
    }
    if "settings" not in fixed:
        strategies = ["full_shard", "full_shard", "shard_grad_op", "shard_optim", "no_shard"]
        strategy = draw(st.sampled_from(strategies))
        values["settings"] = (("strategy", strategy), ("prefetch", draw(st.integers(0, 2))))
        values["replicas"] = ranks if strategy == "no_shard" else 1
    return Case(**{**values, **fixed})
