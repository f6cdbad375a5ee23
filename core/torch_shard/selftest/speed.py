"""Speed: step time, tokens a second and MFU beside DDP and FSDP2; and what offload adds to a step.

All engines live in the same processes and take turns step by step, so that whatever else the machine does hits all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

from ..comm.streams import streams_of
from ..config.offload import Offload
from ..config.precision import Precision, has_bf16
from ..engine import Engine, shard
from ..shard_tensor.tensor import ShardTensor
from .context import Case, Context, Setting
from .devices import peak_flops, total_memory
from .model import Decoder, Size, batch, make, mean_loss
from .ranks import PATIENCE, Ranks
from .results import Result, within

_OURS = "torch_shard"
_LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # relative, where the timed turns begin

# The first whose training state fits is taken. They have about 1.3, 0.35 and 0.12 billion parameters.
_GPU_SIZES = (
    Size(layers=24, width=2048, heads=16, context=2048, vocab=32768, batch=2),
    Size(layers=24, width=1024, heads=16, context=1024, vocab=32768, batch=4),
    Size(layers=12, width=768, heads=12, context=1024, vocab=32768, batch=4),
)
_CPU_SIZES = {
    True: Size(layers=4, width=128, heads=4, context=64, vocab=1024, batch=2),
    False: Size(layers=12, width=512, heads=8, context=128, vocab=8192, batch=2),
}


def speed_cases(setting: Setting) -> list[Case]:
    """Return the one case of the part."""
    return [Case("speed", "a step beside DDP and FSDP2", _beside_peers, setting.untimed)]


def offload_cases(setting: Setting) -> list[Case]:
    """Return the one case of the part."""
    return [Case("offload", "a step with and without offload", _with_offload, setting.untimed)]


@dataclass
class Runner:
    """A model under an engine, and its optimizer, ready for steps.

    Attributes:
        name: the name of the runner in the results.
        model, optimizer: the model as the engine has wrapped or sharded it, and its optimizer.
        autocast: the dtype of autocast in forward; None without autocast.
        engine: the engine of torch_shard; None for DDP and FSDP2.
        loss: the mean loss over the ranks where the timed turns begin.
        wall: the seconds of a step in each timed turn, on the slowest rank.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: torch.dtype | None = None
    engine: Engine | None = None
    loss: float = float("nan")
    wall: list[float] = field(default_factory=list)

    def step(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """Run one training step on this rank's batch, and return its loss."""
        with torch.autocast(data[0].device.type, self.autocast, enabled=self.autocast is not None):
            loss = mean_loss(self.model, data)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def settle(self) -> None:
        """Wait for what a step has left to run in the background: offload's update of parameters."""
        for param in self.model.parameters() if self.engine is not None else ():
            if isinstance(param, ShardTensor):
                _ = param._local  # whoever asks for a shard waits for it; to_local() would count as a write, too


def _beside_peers(context: Context, case: Case) -> list[Result]:
    ranks = context.ranks
    size, low = _size(context.setting, ranks.device), _low(ranks.device)
    runners = [build(name, size, ranks, low) for name in (_OURS, "DDP", "FSDP2")]
    _take_turns(context, runners, size)
    flops = step_flops(size)
    peak = peak_flops(ranks.device, context.setting.peak_tflops)
    shared = {"parameters": _parameters(size), "dtype": "fp32" if low is None else "bf16", "flops per rank": flops}
    results = []
    for runner in runners:
        seconds = statistics.median(runner.wall)
        figures: dict[str, Any] = {
            "step": seconds,
            "fastest": min(runner.wall),
            "slowest": max(runner.wall),
            "tokens/s": ranks.world * size.tokens / seconds,
            "MFU": "unknown" if peak is None else flops / seconds / peak,
        }
        if runner.name != _OURS:
            # Of the same turn, so that a slow moment of the machine is in both.
            pairs = zip(runners[0].wall, runner.wall, strict=True)
            figures[f"{_OURS}'s time relative to it"] = statistics.median(own / other for own, other in pairs)
        results.append(_same_work(case, runner, runners, low, **figures, **shared))
    return results


def _with_offload(context: Context, case: Case) -> list[Result]:
    ranks = context.ranks
    size, low = _size(context.setting, ranks.device), _low(ranks.device)
    kinds: dict[str, Offload | None] = {
        "no offload": None,
        "optimizer and parameters": Offload(),
        "optimizer, parameters stay on the device too": Offload(params=False),
    }
    runners = [build(name, size, ranks, low, _OURS, kind) for name, kind in kinds.items()]
    engines = [runner.engine for runner in runners if runner.engine is not None]
    before = [engine.statistics() for engine in engines]
    for engine in engines:
        engine.time_waiting()
    steps = _take_turns(context, runners, size)
    results = []
    for runner, engine, earlier in zip(runners, engines, before, strict=True):
        waited = engine.statistics().since(earlier)
        ratios = [own / other for own, other in zip(runner.wall, runners[0].wall, strict=True)]
        figures = {
            "step": statistics.median(runner.wall),
            "time relative to no offload": statistics.median(ratios),
            "waited for the host": max(ranks.gather(waited.host_wait)) / steps,
            "waited for gathers": max(ranks.gather(waited.gather_wait)) / steps,
            "waited for reductions": max(ranks.gather(waited.reduce_wait)) / steps,
            "bytes in host memory": engine.plan.predicted.host,
        }
        results.append(_same_work(case, runner, runners, low, **figures))
    return results


def build(
    name: str, size: Size, ranks: Ranks, low: torch.dtype | None, kind: str = "", offload: Offload | None = None
) -> Runner:
    """Put the model under an engine as its documentation says. Collective. On a GPU all but offload get torch's fused AdamW.

    Args:
        name: the name of the runner.
        size: the sizes of the model.
        ranks: the ranks.
        low: the dtype of computation; gradients are reduced in fp32, and parameters and state are fp32. None for fp32.
        kind: ``"torch_shard"``, ``"DDP"`` or ``"FSDP2"``; `name` by default.
        offload: the setting of the engine of torch_shard.
    """
    device = ranks.device
    model: nn.Module = make(size, device)
    engine, autocast = None, None
    fused = device.type == "cuda"
    match kind or name:
        case "DDP":
            model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
            autocast = low
        case "FSDP2":
            policy = MixedPrecisionPolicy(low, None if low is None else torch.float32)
            mesh = init_device_mesh(device.type, (ranks.world,))
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        case _:
            precision = None if low is None else Precision(low, torch.float32)
            engine = shard(model, precision=precision, offload=offload, timeout=PATIENCE)
            fused = fused and offload is None  # the state is on the host, where the engine chooses the kernel
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)
    return Runner(name, model, optimizer, autocast, engine)


def _take_turns(context: Context, runners: Sequence[Runner], size: Size) -> int:
    """Time the runners in turns, after two turns to warm up, and return the number of steps of each. Collective."""
    ranks, device = context.ranks, context.ranks.device
    rounds = 5 if context.setting.quick else 20
    in_a_row = 1 if device.type == "cpu" else 5  # on a GPU the host runs ahead, which one step would not show
    for turn in range(-2, rounds):
        first = turn % len(runners)  # no engine always follows the same one
        for runner in [*runners[first:], *runners[:first]]:
            data = batch(size, device, 0, ranks.rank)
            ranks.meet()
            began = time.perf_counter()
            for _ in range(in_a_row):
                loss = runner.step(data)
            runner.settle()
            streams_of(device).synchronize()
            seconds = (time.perf_counter() - began) / in_a_row
            slowest = max(ranks.gather(seconds))  # a step has ended when its slowest rank has
            if turn >= 0:
                runner.wall.append(slowest)
            else:  # later, on one batch over and over, losses would be close to zero, and so their difference
                runner.loss = sum(ranks.gather(loss.item())) / ranks.world
    return (rounds + 2) * in_a_row


def step_flops(size: Size) -> int:
    """Return the floating-point operations of one rank's forward and backward, as torch counts them. Nothing is computed."""
    with torch.device("meta"):
        model = Decoder(size)
        data = (torch.empty(size.batch, size.context, dtype=torch.int64),) * 2
    with FlopCounterMode(display=False) as counter:
        mean_loss(model, data).backward()
    return counter.get_total_flops()


def _same_work(
    case: Case, runner: Runner, runners: Sequence[Runner], low: torch.dtype | None, **figures: Any
) -> Result:
    """Return a result that passes if the losses say that all runners do the same work. Speed itself is not judged."""
    expected = statistics.median(each.loss for each in runners)
    tolerance = _LOSS_TOLERANCE[low or torch.float32] * expected
    return within(case.part, f"{case.name}: {runner.name}", runner.loss, expected, tolerance, "loss", **figures)


def _low(device: torch.device) -> torch.dtype | None:
    """Return the dtype in which a model of this device would be trained."""
    return torch.bfloat16 if device.type == "cuda" and has_bf16(device) else None


def _parameters(size: Size) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Decoder(size).parameters())


def _size(setting: Setting, device: torch.device) -> Size:
    if device.type == "cpu":
        return _CPU_SIZES[setting.quick]
    # fp32 parameters, gradients and two moments of three engines, one of which shards nothing; a third is left for activations.
    room = 0.6 * total_memory(device) / (16 * (1 + 2 / setting.ranks))
    sizes = _GPU_SIZES[1:] if setting.quick else _GPU_SIZES
    return next((size for size in sizes if _parameters(size) < room), sizes[-1])
