"""Models and steps of training programs: what they do beside one forward and one backward on one stream."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.inside import runtime_of
from torch_shard.activation_offload import ActivationOffload
from torch_shard.comm.process_group_ops import reduce_scatter_single
from torch_shard.comm.streams import streams_of
from torch_shard.fsdp._fully_shard import FSDPModule

from .modes import ACCELERATOR
from .programs import WIDTH, Block, Model


class OffloadedBlock(Block):
    """A checkpointed block whose input waits for backward on the host."""

    offload: ActivationOffload

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.offload.inputs():
            return super().forward(x)


def offloaded_activations() -> nn.Module:
    model = Model(checkpointed=False)
    offload = ActivationOffload(min_bytes=1)
    for block in model.blocks:
        block.__class__, block.offload = OffloadedBlock, offload
    return model


class SplitBlock(Block):
    """A block whose last layer computes on another stream, so that its gradients arrive on two."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        streams = streams_of(ACCELERATOR)
        here, other = streams.current(), self.other if hasattr(self, "other") else streams.new()
        self.other = other
        hidden = torch.relu(self.up(self.norm(x)))
        streams.join(other, [here])
        with streams.use(other):
            result = self.down(hidden)
        streams.join(here, [other])
        return result  # type: ignore[no-any-return]


def split(**options: Any) -> nn.Module:
    model = Model(**options)
    for block in model.blocks:
        block.__class__ = SplitBlock
    return model


def without_vectors() -> nn.Module:
    """A model of matrices alone, which are quantized all."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def adapters() -> nn.Module:
    model = Model()
    for name, param in model.named_parameters():
        param.requires_grad = "down" in name
    return model


def two_streams(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """One unit computes on two streams at once."""
    streams = runtime_of(engine).collectives.streams
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


def joined_late(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """One unit computes on two streams, and the next one begins on one of them while the other still computes."""
    streams = runtime_of(engine).collectives.streams
    here, other = streams.current(), streams.new()
    first = model.first(x)
    streams.join(other, [here])
    with streams.use(other):
        right = model.blocks[0](first)
    left = model.blocks[1](model.blocks[0](first * 0.5))
    streams.join(here, [other])
    loss = model.last(model.blocks[2](left + right)).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def two_chains(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Two chains of units run side by side on two streams. The second one has two units for each of the first."""
    streams = runtime_of(engine).collectives.streams
    here, other = streams.current(), streams.new()
    left = right = model.first(x)
    streams.join(other, [here])
    for number, block in enumerate(model.blocks):
        if number % 3 == 0:
            left = block(left)
        else:
            with streams.use(other):
                right = block(right)
    streams.join(here, [other])
    loss = model.last(left + right).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def streams_apart(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A second forward runs on another stream, which does not wait for the first one."""
    streams = runtime_of(engine).collectives.streams
    here, other = streams.current(), streams.new()
    streams.join(other, [here])
    first = model(x)
    with streams.use(other):
        second = model(x)
    streams.join(here, [other])
    loss: torch.Tensor = (first + second).float().square().mean()
    loss.backward()
    return loss


def on_another_stream(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Training runs on another stream than set-up."""
    streams = runtime_of(engine).collectives.streams
    if not hasattr(model, "stream"):
        model.stream = streams.new()
    streams.join(model.stream, [streams.current()])
    with streams.use(model.stream):
        loss = model(x).float().square().mean()
        loss.backward()
    streams.join(streams.current(), [model.stream])
    return loss  # type: ignore[no-any-return]


def failing(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each second backward fails in the middle, on all ranks."""
    model.count = getattr(model, "count", 0) + 1
    hidden = model.first(x)
    for number, block in enumerate(model.blocks):
        hidden = block(hidden)
        if number == 1 and model.count % 2 == 0:
            hidden.register_hook(fail)
    loss = model.last(hidden).float().square().mean()
    with contextlib.suppress(ZeroDivisionError):
        loss.backward()
    return loss  # type: ignore[no-any-return]


def fail(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def branches(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each forward takes another way."""
    model.count = getattr(model, "count", 0) + 1
    blocks = [model.blocks[i] for i in ((0, 1, 2), (2, 0), (1,))[model.count % 3]]
    hidden = model.first(x)
    for block in blocks:
        hidden = block(hidden)
    loss = model.last(hidden).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def penalty(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A backward of gradients."""
    x = x.requires_grad_()
    loss = model(x).float().square().mean()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    loss = loss + slope.square().sum()
    loss.backward()
    return loss


def assigned(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The program assigns gradients that it has computed itself."""
    loss = model(x).float().square().mean()
    parameters = list(model.parameters())
    for param, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        param.grad = grad
    return loss  # type: ignore[no-any-return]


def lone_reader(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Rank 0 evaluates alone between the steps."""
    if dist.get_rank() == 0:
        with torch.no_grad():
            model(x)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def clipped_by_value(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).float().square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
    return loss  # type: ignore[no-any-return]


def saved(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """All ranks make full state dicts."""
    loss = model(x).float().square().mean()
    loss.backward()
    engine.state_dict(form="full")
    return loss  # type: ignore[no-any-return]


def saved_in_background(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The files of a checkpoint are written while training goes on."""
    loss = model(x).float().square().mean()
    loss.backward()
    folder = Path(tempfile.gettempdir(), f"simulated-{os.environ.get('MASTER_PORT', os.getppid())}")
    engine.save(folder, asynchronous=True)
    engine.finish_saving()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return loss  # type: ignore[no-any-return]


def dropped(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A first forward has no backward: its graph is dropped at once."""
    model(x)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def hooked(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A hook of the user's reduces the gradients."""
    _hook(engine, model)
    loss = model(x).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def hooked_and_failing(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Each second backward with such a hook fails."""
    _hook(engine, model)
    return failing(engine, model, x)


def _hook(engine: Any, model: Any) -> None:
    if not hasattr(model, "is_hooked"):
        model.is_hooked = True
        engine.register_comm_hook(engine.shard_group, _average)


def _average(group: Any, gradients: torch.Tensor, output: torch.Tensor) -> None:
    reduce_scatter_single(output, gradients, op=dist.ReduceOp.AVG, group=group)


def edited(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Full parameters are edited before each step, and read in the middle of it."""
    with engine.gathered(), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.999)
    hidden = model.first(x)
    with engine.gathered(model.blocks), torch.no_grad():
        sum(param.square().sum() for param in model.blocks.parameters())
    for block in model.blocks:
        hidden = block(hidden)
    loss = model.last(hidden).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def stepped_elsewhere(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """Parameters change on another stream, behind which gathers are put by FSDP2's function for that."""
    streams = runtime_of(engine).collectives.streams
    other = streams.new()
    streams.join(other, [streams.current()])
    with streams.use(other), torch.no_grad():
        for param in model.parameters():
            param.mul_(0.999)
    FSDPModule.set_post_optim_event(model, streams.record(other))
    loss = model(x).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def weight_in_backward(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A hook computes with a weight whose unit is being gathered for the backward that comes next."""
    hidden = model.first(x)
    for block in model.blocks:
        hidden = block(hidden)
    hidden.register_hook(lambda gradient: _length(model.blocks[1].up.weight))
    loss = model.last(hidden).float().square().mean()
    loss.backward()
    return loss  # type: ignore[no-any-return]


@torch.no_grad()
def _length(weight: torch.Tensor) -> None:
    weight.square().sum()


def own_collective(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A collective of the user's is asked for on sharded gradients."""
    loss = model(x).float().square().mean()
    loss.backward()
    for param in model.last.parameters():
        dist.all_reduce(param.grad, op=dist.ReduceOp.MAX, group=engine.shard_group, async_op=True).wait()
    return loss  # type: ignore[no-any-return]


def scaled(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradients are those of a scaled loss, and are divided by the scale, which the device has."""
    loss = model(x).float().square().mean()
    scale = torch.full((), 8.0, device=loss.device)
    (loss * scale).backward()
    gradients = [param.grad for param in model.parameters()]
    # What a GradScaler gives to each device that holds gradients.
    found_inf = torch.zeros(1, device=loss.device).to("cpu", non_blocking=True)
    inverse = scale.reciprocal().to("cpu", non_blocking=True)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse)
    return loss  # type: ignore[no-any-return]


class Pair(nn.Module):
    """Two models, of which the second takes what the first one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Model(), Model()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.right(x + self.left(x))  # type: ignore[no-any-return]


def tensor_parallel(model: nn.Module) -> Any:
    """Cut the layers of a :class:`Model` over pairs of ranks, and its rows between them; return the mesh's other dimension."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    rows, whole = Shard(0), Replicate()
    plan = {
        "first": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "blocks.*.norm": SequenceParallel(sequence_dim=0),
        "blocks.*.up": ColwiseParallel(input_layouts=rows),
        "blocks.*.down": RowwiseParallel(output_layouts=rows),
        "last": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,), use_local_output=True),
    }
    parallelize_module(model, mesh["tp"], plan)
    return mesh["dp"]


def on_outputs(engine: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    """A weight is used outside its module, and is part of the loss."""
    hidden = model.blocks[0](model.first(x))
    hidden = torch.nn.functional.linear(hidden, model.blocks[1].up.weight)
    loss = hidden.float().square().mean() + 1e-3 * model.blocks[2].down.weight.square().sum()
    loss.backward()
    return loss  # type: ignore[no-any-return]


def matrices(params: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=lr)


def fused(params: list[Any], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, fused=True)
