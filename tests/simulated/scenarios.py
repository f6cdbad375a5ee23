"""Training programs that run on a simulated device."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from torch_shard.activation_offload import ActivationOffload

from .modes import ACCELERATOR
from .simulation import group, simulated
from .streams import Pace

WIDTH, ROWS = 16, 4


class Block(nn.Module):
    def __init__(self, checkpointed: bool | None) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return x + self.compute(x)
        # The default check would find another device where torch calls hooks, in which the simulation's modes are off.
        options = {} if self.reentrant else {"determinism_check": "none"}
        return x + checkpoint(self.compute, x, use_reentrant=self.reentrant, **options)  # type: ignore[no-any-return]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks between an input and an output layer."""

    def __init__(self, blocks: int = 3, checkpointed: bool | None = None, norm: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(blocks))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Report:
    """What a simulation has found on one rank."""

    races: list[str]
    failures: list[str]  # errors of finalizers
    waits: Mapping[str, int]  # of the host, by place in the engine's code, in the last two steps
    sites: Mapping[str, int]
    loss: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training program. `step` runs forward and backward once, and returns the loss."""

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Model
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    step: Callable[[Any, nn.Module, torch.Tensor], torch.Tensor] | None = None
    accumulate: int = 1
    clip: bool = False
    steps: int = 5
    evaluate: bool = False
    close: bool = False

    def run(self, pace: Pace = "early", seed: int = 0, dropped: tuple[str, ...] = (), **_: Any) -> Report:
        """Train on this rank, and return what was found. Collective."""
        torch.manual_seed(0)
        over = group()
        with simulated(pace, seed, dropped) as world:
            with ACCELERATOR:
                model = self.model()
            engine = torch_shard.shard(model, torch_shard.ShardConfig(**self.config), mesh=over)
            optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            loss = torch.zeros(())
            for number in range(self.steps):
                if number == self.steps - 2:
                    world.streams.waits.clear()
                loss = self._step(engine, model, optimizer)
            waits = dict(world.streams.waits)
            if self.close:
                engine.close(optimizer)
            last = loss.item()
            del model, engine, optimizer
            gc.collect()
        return Report(list(world.memory.races.values()), world.failures, waits, dict(world.streams.sites), last)

    def _step(self, engine: Any, model: nn.Module, optimizer: Any) -> torch.Tensor:
        loss = torch.zeros(())
        for micro in range(self.accumulate):
            x = torch.randn(ROWS, WIDTH, device=ACCELERATOR)
            with engine.no_sync() if micro + 1 < self.accumulate else contextlib.nullcontext():
                if self.step is None:
                    loss = model(x).float().square().mean()
                    loss.backward()
                else:
                    loss = self.step(engine, model, x)
        if self.clip:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if self.evaluate:
            with torch.no_grad():
                model(torch.randn(ROWS, WIDTH, device=ACCELERATOR))
        return loss.detach()


class OffloadedBlock(Block):
    """A checkpointed block whose input waits for backward on the host."""

    offload: ActivationOffload

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.offload.inputs():
            return super().forward(x)


def _offloaded_activations() -> nn.Module:
    model = Model(checkpointed=False)
    offload = ActivationOffload(min_bytes=1)
    for block in model.blocks:
        block.__class__, block.offload = OffloadedBlock, offload
    return model


def _adapters() -> nn.Module:
    model = Model()
    for name, param in model.named_parameters():
        param.requires_grad = "down" in name
    return model


def _two_streams(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """One unit computes on two streams at once."""
    streams = engine._runtime.collectives.streams
    here, other = streams.current(), streams.new()
    first = model.first(x)
    streams.join(other, [here])
    with streams.use(other):
        right = model.blocks[0](first)
    left = model.blocks[0](first * 0.5)
    streams.join(here, [other])
    loss = model.last(model.blocks[1](left + right)).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def _streams_apart(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A second forward runs on another stream, which does not wait for the first one."""
    streams = engine._runtime.collectives.streams
    here, other = streams.current(), streams.new()
    streams.join(other, [here])
    first = model(x)
    with streams.use(other):
        second = model(x)
    streams.join(here, [other])
    loss: torch.Tensor = (first + second).float().square().mean()
    loss.backward()
    return loss


def _on_another_stream(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Training runs on another stream than set-up."""
    streams = engine._runtime.collectives.streams
    if not hasattr(model, "stream"):
        model.stream = streams.new()
    streams.join(model.stream, [streams.current()])
    with streams.use(model.stream):
        loss = model(x).float().square().mean()
        loss.backward()
    streams.join(streams.current(), [model.stream])
    return loss  # type: ignore[no-any-return]


def _failing(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each second backward fails in the middle, on all ranks."""
    model.count = getattr(model, "count", 0) + 1
    hidden = model.first(x)
    for number, block in enumerate(model.blocks):
        hidden = block(hidden)
        if number == 1 and model.count % 2 == 0:
            hidden.register_hook(_fail)
    loss = model.last(hidden).float().square().mean()
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    return loss  # type: ignore[no-any-return]


def _fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def _branches(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each forward takes another way."""
    model.count = getattr(model, "count", 0) + 1
    blocks = [model.blocks[i] for i in ((0, 1, 2), (2, 0), (1,))[model.count % 3]]
    hidden = model.first(x)
    for block in blocks:
        hidden = block(hidden)
    loss = model.last(hidden).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def _penalty(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A backward of gradients."""
    x = x.requires_grad_()
    loss = model(x).float().square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    loss.backward()
    return loss


def _lone_reader(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Rank 0 evaluates alone between the steps."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def _clipped_by_value(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    return loss  # type: ignore[no-any-return]


def _saved(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """All ranks make full state dicts."""
    loss = model(x).float().square().mean()
    loss.backward()
    engine.state_dict(form="full")
    return loss  # type: ignore[no-any-return]


def _saved_in_background(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The files of a checkpoint are written while training goes on."""
    loss = model(x).float().square().mean()
    loss.backward()
    folder = Path(tempfile.gettempdir(), f"simulated-{os.environ.get('MASTER_PORT', os.getppid())}")
    engine.save(folder, asynchronous=True)
    engine.finish_saving()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return loss  # type: ignore[no-any-return]


def _on_outputs(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A weight is used outside its module, and is part of the loss."""
    hidden = model.blocks[0](model.first(x))
    hidden = torch.nn.functional.linear(hidden, model.blocks[1].up.weight)
    loss = hidden.float().square().mean() + 1e-3 * model.blocks[2].down.weight.square().sum()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def _matrices(params: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=lr)


def _fused(params: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)


BF16 = torch_shard.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ROUNDED = torch_shard.Precision(master_dtype=torch.bfloat16, stochastic_rounding=True)
INT8 = torch_shard.Quantized(parameters="int8", gradients="int8", min_size=1)

PRECISIONS: dict[str, Any] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "bf16 summed in fp32": BF16,
    "fp16": torch.float16,
}
STRATEGIES = ("full_shard", "shard_grad_op", "shard_optim", "no_shard")
CHECKPOINTED: dict[str, bool | None] = {"": None, ", checkpointed": False, ", checkpointed reentrantly": True}
OFFLOADS: dict[str, Any] = {
    "all": "cpu",
    "optimizer": torch_shard.Offload(params=False),
    "pageable": torch_shard.Offload(pin_memory=False),
}

# Each strategy with each precision, accumulation and kind of checkpointing.
PLAIN = {
    f"{strategy}, {precision}{', accumulated' if accumulate > 1 else ''}{checkpointed}": Scenario(
        config={"strategy": strategy, "precision": PRECISIONS[precision]},
        model=functools.partial(Model, checkpointed=CHECKPOINTED[checkpointed]),
        accumulate=accumulate,
        clip=True,
    )
    for strategy in STRATEGIES
    for precision in PRECISIONS
    for accumulate in (1, 2)
    for checkpointed in CHECKPOINTED
}

SPECIAL = {
    "sgd": Scenario(optimizer=torch.optim.SGD),
    "fused": Scenario(optimizer=_fused),
    "muon": Scenario(optimizer=_matrices),
    "muon in bf16": Scenario(optimizer=_matrices, config={"precision": BF16}),
    "rounded": Scenario(config={"precision": ROUNDED}),
    "quantized": Scenario(config={"quantized": INT8}),
    "quantized in bf16": Scenario(config={"quantized": INT8, "precision": BF16}),
    "adapters": Scenario(model=_adapters),
    "adapters in bf16": Scenario(model=_adapters, config={"precision": BF16}),
    "evaluation": Scenario(evaluate=True),
    "evaluation in bf16": Scenario(evaluate=True, config={"precision": BF16}),
    "buffers": Scenario(model=functools.partial(Model, norm=True)),
    "one communicator": Scenario(config={"single_communicator": True}),
    "no prefetch": Scenario(config={"prefetch": 0}),
    "more prefetch": Scenario(config={"prefetch": 3}),
    "debug": Scenario(config={"debug": True}),
    "two streams": Scenario(step=_two_streams),
    "two streams in bf16": Scenario(step=_two_streams, config={"precision": BF16}),
    "two streams, replicated": Scenario(step=_two_streams, config={"strategy": "no_shard", "precision": BF16}),
    "two streams, shards kept": Scenario(step=_two_streams, config={"strategy": "shard_grad_op"}),
    "streams apart": Scenario(step=_streams_apart),
    "another stream": Scenario(step=_on_another_stream),
    "another stream in bf16": Scenario(step=_on_another_stream, config={"precision": BF16}),
    "another stream, replicated": Scenario(
        step=_on_another_stream, config={"strategy": "no_shard", "precision": BF16}, accumulate=2
    ),
    "another stream, quantized": Scenario(step=_on_another_stream, config={"quantized": INT8}),
    "another stream, offload": Scenario(step=_on_another_stream, config={"offload": "cpu"}),
    "failing backwards": Scenario(step=_failing),
    "failing backwards in bf16": Scenario(step=_failing, config={"precision": BF16}),
    "branches": Scenario(step=_branches, steps=7),
    "gradient penalty": Scenario(step=_penalty),
    "lone reader": Scenario(step=_lone_reader),
    "lone reader of quantized shards": Scenario(step=_lone_reader, config={"quantized": INT8}),
    "clipped by value": Scenario(step=_clipped_by_value),
    "state dicts": Scenario(step=_saved),
    "saved in the background": Scenario(step=_saved_in_background),
    "saved in the background, bf16": Scenario(step=_saved_in_background, config={"precision": BF16}),
    "activations on the host": Scenario(model=_offloaded_activations),
    "activations on the host, another stream": Scenario(model=_offloaded_activations, step=_on_another_stream),
    "weights used elsewhere": Scenario(step=_on_outputs),
    "closed": Scenario(config={"precision": BF16}, close=True),
}

# Of four ranks, in two replicas.
HYBRID = {
    f"{strategy}, {precision}{', accumulated' if accumulate > 1 else ''}": Scenario(
        config={"strategy": strategy, "shard_size": 2, "precision": PRECISIONS[precision]}, accumulate=accumulate
    )
    for strategy in ("hybrid_shard", "hybrid_shard_zero2")
    for precision in ("fp32", "bf16", "bf16 summed in fp32")
    for accumulate in (1, 2)
} | {
    "secondary shards": Scenario(config={"reshard_after_forward": 2}),
    "hybrid_shard, quantized": Scenario(config={"strategy": "hybrid_shard", "shard_size": 2, "quantized": INT8}),
    "hybrid_shard, another stream": Scenario(
        step=_on_another_stream, config={"strategy": "hybrid_shard", "shard_size": 2, "precision": BF16}
    ),
}

# Of one process without a process group.
ALONE = {
    "fp32": Scenario(clip=True),
    "bf16": Scenario(config={"precision": BF16}, clip=True, accumulate=2),
    "two streams in bf16": Scenario(step=_two_streams, config={"precision": BF16}),
    "another stream in bf16": Scenario(step=_on_another_stream, config={"precision": BF16}),
    "offload": Scenario(config={"offload": "cpu"}, clip=True),
    "offload in bf16, accumulated": Scenario(config={"offload": "cpu", "precision": BF16}, accumulate=2),
    "offload, another stream": Scenario(step=_on_another_stream, config={"offload": "cpu"}),
}

OFFLOADED = {
    f"offload of {what}, {precision}{', accumulated' if accumulate > 1 else ''}": Scenario(
        config={"offload": OFFLOADS[what], "precision": PRECISIONS[precision]}, accumulate=accumulate, clip=True
    )
    for what in OFFLOADS
    for precision in ("fp32", "bf16 summed in fp32")
    for accumulate in (1, 2)
} | {
    "offload, closed": Scenario(config={"offload": "cpu"}, close=True),
    "offload, quantized": Scenario(config={"offload": "cpu", "quantized": INT8}),
    "offload, state dicts": Scenario(config={"offload": "cpu"}, step=_saved),
}

SCENARIOS: dict[str, Scenario] = PLAIN | SPECIAL | OFFLOADED

QUICK = (
    "full_shard, fp32",
    "full_shard, bf16 summed in fp32, accumulated, checkpointed",
    "shard_grad_op, bf16",
    "no_shard, bf16 summed in fp32",
    "two streams in bf16",
    "another stream, replicated",
    "muon",
    "quantized",
    "failing backwards",
    "offload of all, bf16 summed in fp32",
    "offload, closed",
)
