"""How a training program runs on a simulated device, and a model for it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard

from .modes import ACCELERATOR
from .simulation import group, simulated
from .sites import Site
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
    sites: Mapping[Site, int]
    loss: float


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training program.

    Attributes:
        step: runs forward and backward once, and returns the loss.
        parallelized: makes a model tensor-parallel; returns the dimension of its mesh over which it is sharded.
        own_streams: the backend runs each collective on a stream of its own, whatever it is asked for, as older ones do.
        in_backward: the optimizer steps in backward.
        parts: the modules that are sharded, each with an engine of its own. The first of these is given to `step`.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    model: Callable[[], nn.Module] = Model
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    step: Callable[[Any, nn.Module, torch.Tensor], torch.Tensor] | None = None
    parts: tuple[str, ...] = ("",)
    own_streams: bool = False
    parallelized: Callable[[nn.Module], Any] | None = None
    accumulate: int = 1
    in_backward: bool = False
    clip: bool = False
    steps: int = 5
    evaluate: bool = False
    close: bool = False

    def run(self, pace: Pace = "early", seed: int = 0, dropped: Iterable[Site] = (), **_: Any) -> Report:
        """Train on this rank, and return what was found. Collective."""
        torch.manual_seed(0)
        over: Any = group()
        gc.freeze()  # what was there before need not be looked through
        with simulated(pace, seed, dropped, self.own_streams) as world:
            with ACCELERATOR:
                model = self.model()
            if self.parallelized is not None:
                over = self.parallelized(model)
            parts = [model.get_submodule(part) for part in self.parts]
            engines = [torch_shard.shard(part, torch_shard.ShardConfig(**self.config), mesh=over) for part in parts]
            engine = engines[0]
            optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            if self.in_backward:
                engine.step_in_backward(optimizer)
            loss = torch.zeros(())
            for number in range(self.steps):
                if number == self.steps - 2:
                    world.streams.waits.clear()
                loss = self._step(engine, model, optimizer)
            waits = dict(world.streams.waits)
            if self.close:
                engine.close(optimizer)
            last = loss.item()
            del model, parts, engine, engines, optimizer
            gc.collect()
        gc.unfreeze()
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
