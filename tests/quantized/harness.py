"""What quantized communication makes of values, written out: one block at a time, all ranks in one place, without any buffer of
the engine's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch
from tests.support.marks import exhaustive
from torch_shard import Quantized

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BLOCK = 16
SMALL = {"block": BLOCK, "min_size": 0}
PARAMETERS, GRADIENTS = Quantized("int8", **SMALL), Quantized(gradients="int8", **SMALL)
BOTH = Quantized("int8", "int8", **SMALL)
SHARDED = ["full_shard", *exhaustive("shard_grad_op", "shard_optim")]


def decoded(row: torch.Tensor, kind: str = "int8", block: int = BLOCK) -> torch.Tensor:
    """What becomes of a row of values on the way."""
    result = torch.empty_like(row)
    for start in range(0, len(row), block):
        part = row[start : start + block]
        scale = part.abs().max() / (127 if kind == "int8" else 448)
        if scale == 0:
            result[start : start + block] = 0
        elif kind == "int8":
            result[start : start + block] = torch.round(part / scale) * scale
        else:
            result[start : start + block] = (part / scale).to(torch.float8_e4m3fn).to(row.dtype) * scale
    return result


def laid_out(layout: Any, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Parameters, or their gradients, in the place that a flat buffer has for each; zeros between them, and for what lacks."""
    flat = torch.zeros(layout.numel, dtype=next(iter(tensors.values())).dtype)
    for slot in layout.slots:
        if slot.name in tensors:
            torch.as_strided(flat, slot.shape, slot.stride, slot.offset).copy_(tensors[slot.name])
    return flat


def picked(layout: Any, flat: torch.Tensor) -> dict[str, torch.Tensor]:
    return {s.name: torch.as_strided(flat, s.shape, s.stride, s.offset) for s in layout.slots}


def layouts(engine: torch_shard.Engine) -> list[Any]:
    return [flat.layout for unit in engine.units for flat in unit.flats]


def is_quantized(layout: Any) -> bool:
    """By the rule alone: matrices are, vectors are not, and the two do not share a buffer."""
    (one,) = {len(slot.shape) > 1 for slot in layout.slots}
    return one


def as_gathered(plain: nn.Module, engine: torch_shard.Engine, kind: str = "int8", dtype: Any = None) -> nn.Module:
    """A copy of `plain` with the weights that a sharded model of `engine` computes with, in `dtype`."""
    result = copy.deepcopy(plain)
    values = {name: p.detach() for name, p in plain.named_parameters()}
    for layout in layouts(engine):
        flat = laid_out(layout, values)
        if is_quantized(layout):
            flat = torch.cat([decoded(row, kind) for row in flat.view(layout.world_size, -1)])
        for name, value in picked(layout, flat).items():
            result.get_parameter(name).data = value.to(dtype or value.dtype).clone()
    return result


class Reduced:
    """The reduction of gradients, with error feedback or without, over all steps of a training."""

    def __init__(self, engine: torch_shard.Engine, feedback: bool = True) -> None:
        self.layouts, self.feedback = layouts(engine), feedback
        self.lost: dict[tuple[int, int], torch.Tensor] = {}

    def __call__(self, plain: nn.Module) -> dict[str, torch.Tensor]:
        """The gradients that all ranks together make of each one's own, in ``plain.grad``. Collective."""
        world = dist.get_world_size()
        mine = {n: p.grad * (1.0 / world) for n, p in plain.named_parameters() if p.grad is not None}
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, mine)
        result = {}
        for number, layout in enumerate(self.layouts):
            total = None
            for rank, grads in enumerate(everyone):
                flat = laid_out(layout, grads)
                if is_quantized(layout):
                    before = self.lost.get((number, rank), torch.zeros(len(flat), dtype=BF16))
                    whole = flat + before if self.feedback else flat
                    flat = torch.cat([decoded(row) for row in whole.view(world, -1)])
                    self.lost[number, rank] = (whole - flat).to(BF16)
                total = flat if total is None else total + flat
            result.update(picked(layout, total))
        return result


def sharded(quantized: Quantized, build: Any = MLP, **settings: Any) -> tuple[nn.Module, nn.Module, torch_shard.Engine]:
    """A model, its plain copy, and the engine."""
    torch.manual_seed(0)
    model = build()
    plain = copy.deepcopy(model)
    engine = torch_shard.shard(model, quantized=quantized, **{"unit_bytes": 500, "timeout": 20.0, **settings})
    return model, plain, engine


def inputs(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step).float()
