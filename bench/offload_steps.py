"""What :mod:`offload` measures of each engine, in processes of one rank: steps, device memory, and when the GPU does nothing."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from engines import Runner
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

__all__ = ["LABELS", "LOW", "MODELS", "compare", "find_out", "link_speed", "memory_speed", "plan_of", "waiting"]

LOW = torch.bfloat16
LR = 1e-4

# Of GPT's shape, which is that of LLaMA's but for norms and the gate; sequences of 2048 tokens.
MODELS = {
    "tiny": GPTConfig(layers=4, width=64, heads=2, context=32, vocab=256),
    "1B": GPTConfig(layers=20, width=2048, heads=16, context=2048, vocab=32000),
    "3B": GPTConfig(layers=26, width=3072, heads=24, context=2048, vocab=32000),
    "7B": GPTConfig(layers=32, width=4096, heads=32, context=2048, vocab=32000),
    "13B": GPTConfig(layers=40, width=5120, heads=40, context=2048, vocab=32000),
    "30B": GPTConfig(layers=48, width=7168, heads=56, context=2048, vocab=32000),
    "70B": GPTConfig(layers=80, width=8192, heads=64, context=2048, vocab=32000),
}

LABELS = {
    "offload": "torch_shard, offload",
    "resident": "torch_shard, offload, slices on the device",
    "none": "torch_shard, no offload",
    "fsdp2": "FSDP2, CPUOffloadPolicy",
    "deepspeed": "DeepSpeed, ZeRO-3 offload",
}

MARK = "erfinv"  # a kernel that no step has, in the name of which this stands


# -- engines ----------------------------------------------------------------------------------------------------------


def build(name: str, config: GPTConfig, device: torch.device, disk: str | None = None) -> Runner:
    """A GPT, made on meta, under an engine: fp32 parameters and AdamW's state, computed with and reduced in bf16.

    The peers get torch's fused AdamW, without which theirs is a loop over tensors. `disk`: a directory for torch_shard's
    optimizer state.
    """
    if name == "deepspeed":
        return _with_deepspeed(config)
    with torch.device("meta"):
        model: nn.Module = GPT(config)
    mesh = init_device_mesh(device.type, (1,))
    if name == "fsdp2":
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        settings: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=LOW),
            "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
        }
        assert isinstance(model, GPT)
        for block in model.blocks:
            fully_shard(block, **settings)
        fully_shard(model, **settings)
        model.to_empty(device="cpu")
        for module in model.modules():
            fill(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
        return Runner(name, model, optimizer, lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
    import torch_shard

    engine = torch_shard.shard(model, config_of(name, disk), mesh=mesh)
    return Runner(name, model, torch.optim.AdamW(model.parameters(), lr=LR), engine.clip_grad_norm_)


def config_of(name: str, disk: str | None = None) -> Any:
    """torch_shard's settings under one of the names of :data:`LABELS`."""
    import torch_shard

    offload = None if name == "none" else torch_shard.Offload(params=name != "resident", nvme=disk)
    return torch_shard.ShardConfig(
        precision=torch_shard.Precision(param_dtype=LOW), offload=offload, init_fn=fill, sync_module_states=False
    )


class _DeepSpeed(Runner):
    """Its engine has backward, clipping and the step in it."""

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        engine: Any = self.model
        loss: Tensor = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()


def _with_deepspeed(config: GPTConfig) -> Runner:
    import deepspeed

    place = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = GPT(config)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    return _DeepSpeed("deepspeed", engine, optimizer, lambda limit: None)


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Initialise one module's own parameters: weights at random, by copies of one piece, which is fast on any device."""
    for name, param in module.named_parameters(recurse=False):
        values = param.to_local() if hasattr(param, "to_local") else param
        if values.dim() < 2:
            values.fill_(float(isinstance(module, nn.LayerNorm) and name == "weight"))
            continue
        piece = 0.02 * torch.randn(min(values.numel(), 1 << 20), generator=torch.Generator().manual_seed(0))
        piece = piece.to(values)
        for part in values.view(-1).split(piece.numel()):
            part.copy_(piece[: part.numel()])


# -- steps ------------------------------------------------------------------------------------------------------------


def compare(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Time the engines in turns, each several steps in a row; the first turns are for warming up."""
    from train import finish

    device = start(args, folder)
    config = MODELS[args.model]
    data = batch(config, args.batch, device)
    runners = [build(name, config, device, args.disk) for name in args.engines]
    found: dict[str, dict[str, Any]] = {name: {"wall": [], "peak": 0, "loss": []} for name in args.engines}
    for turn in range(-args.warm_up, args.rounds):
        first = turn % len(runners)
        for runner in runners[first:] + runners[:first]:
            seconds, peak, loss = timed(runner, data, device, args.steps)
            own = found[runner.name]
            own["loss"].append(loss)
            if turn >= 0:
                own["wall"].append(seconds)
                own["peak"] = max(own["peak"], peak)
    for runner in runners:
        own = found[runner.name]
        if device.type == "cuda":
            own["trace"] = traced(runner, data)
        if runner.name not in ("fsdp2", "deepspeed"):
            own["activations"] = saved_bytes(runner, data)
    finish(rank, folder, found)


def start(args: argparse.Namespace, folder: str) -> torch.device:
    """One rank, on the GPU unless `args` says otherwise."""
    device = torch.device("cpu") if args.smoke else torch.device("cuda", 0)
    if args.threads:
        torch.set_num_threads(args.threads)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def batch(config: GPTConfig, size: int, device: torch.device) -> list[Tensor]:
    """Random tokens and targets, the same for all."""
    tokens = torch.randint(config.vocab, (size, config.context + 1), generator=torch.Generator().manual_seed(0))
    return [tokens[:, :-1].to(device), tokens[:, 1:].to(device)]


def timed(runner: Runner, data: list[Tensor], device: torch.device, steps: int) -> tuple[float, int, float]:
    """Seconds of one of `steps` steps in a row, with all that they leave in the background, the most bytes on the device
    beyond those at the beginning, and the last loss."""
    gc.collect()
    base = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(steps):
        loss = runner.step(*data)
    runner.settle()
    peak = 0
    if device.type == "cuda":
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - base
    return (time.perf_counter() - began) / steps, peak, loss.item()


def saved_bytes(runner: Runner, data: list[Tensor]) -> int:
    """Bytes that autograd keeps between forward and backward, parameters left out: the step's activations."""
    from torch_shard.shard_tensor.unsharded_param import is_of_unit

    leaves = {p.untyped_storage().data_ptr() for p in runner.model.parameters() if not hasattr(p, "to_local")}
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, nn.Parameter) and not is_of_unit(tensor) and storage.data_ptr() not in leaves:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = runner.model(*data)
    loss.backward()
    runner.optimizer.zero_grad()
    return sum(seen.values())


# -- what the GPU waits for -------------------------------------------------------------------------------------------


def traced(runner: Runner, data: list[Tensor], steps: int = 4) -> dict[str, float]:
    """Of whole steps of a trace: which part of the time no kernel ran, and in which part of it data crossed to or from the
    host."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    mark = torch.zeros(1, device=data[0].device)
    runner.step(*data)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps + 1):
            mark.erfinv_()  # begins when the kernels of the step before have ended
            runner.step(*data)
        runner.settle()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA]
    marks = sorted(e.time_range.start for e in events if MARK in e.name.lower())
    if len(marks) != steps + 1:
        raise RuntimeError(f"the trace has {len(marks)} marks in place of {steps + 1}")
    copies = [(e.time_range.start, e.time_range.end) for e in events if e.name.startswith(("Memcpy", "Memset"))]
    kernels = [(e.time_range.start, e.time_range.end) for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    idle, crossing = waiting(kernels, copies, marks[0], marks[-1])
    return {"idle": idle, "crossing": crossing, "seconds": (marks[-1] - marks[0]) / steps * 1e-6}


def waiting(
    kernels: Iterable[tuple[float, float]], copies: Iterable[tuple[float, float]], begin: float, end: float
) -> tuple[float, float]:
    """Shares of the time from `begin` to `end`: in which no kernel ran, and in which none ran but a copy did."""
    kernels = list(kernels)
    working = _length(kernels, begin, end)
    either = _length([*kernels, *copies], begin, end)
    whole = end - begin
    return (whole - working) / whole, (either - working) / whole


def _length(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Of what the spans cover together, within the limits."""
    total, reached = 0.0, begin
    for start_, stop in sorted(spans):
        first, last = max(start_, reached), min(stop, end)
        if last > first:
            total += last - first
            reached = last
    return total


# -- the machine ------------------------------------------------------------------------------------------------------


def find_out(rank: int, args: argparse.Namespace, folder: str) -> None:
    """The speeds that bound a step."""
    from train import finish

    device = start(args, folder)
    found = {"host": memory_speed(1 << 24 if args.smoke else 1 << 27), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found |= link_speed(device) | {"compute": compute_speed(device, MODELS[args.model].width)}
    finish(rank, folder, found)


def memory_speed(numel: int, repeat: int = 7) -> float:
    """Bytes a second that this process's threads read and write in host memory: c = a + b, of fp32, the best of several."""
    a, b, c = torch.ones(numel), torch.ones(numel), torch.zeros(numel)
    best = float("inf")
    for _ in range(repeat):
        began = time.perf_counter()
        torch.add(a, b, out=c)
        best = min(best, time.perf_counter() - began)
    return 3 * a.nbytes / best


def link_speed(device: torch.device, nbytes: int = 1 << 28, repeat: int = 8) -> dict[str, float]:
    """Bytes a second that cross between page-locked memory and the device: to it, from it, and each way while both go on."""
    host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def copy(ways: Iterable[int]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeat):
            for way in ways:
                with torch.cuda.stream(streams[way]):
                    into, out_of = (there[0], host[0]) if way == 0 else (host[1], there[1])
                    into.copy_(out_of, non_blocking=True)
        torch.cuda.synchronize()
        return repeat * nbytes / (time.perf_counter() - began)

    copy((0, 1))
    return {"to": copy((0,)), "from": copy((1,)), "both": copy((0, 1))}


def compute_speed(device: torch.device, width: int, repeat: int = 20) -> float:
    """Floating-point operations a second of a block's largest product, in bf16."""
    rows = 8192
    a, b = (torch.randn(*shape, device=device, dtype=LOW) for shape in ((rows, width), (width, 4 * width)))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeat):
        a @ b
    torch.cuda.synchronize()
    return repeat * 2 * rows * width * 4 * width / (time.perf_counter() - began)


def plan_of(model: str, name: str, disk: str | None = None) -> Any:
    """The plan for a model of which nothing exists."""
    import torch_shard

    with torch.device("meta"):
        plain = GPT(MODELS[model])
    return torch_shard.make_plan(plain, config_of(name, disk), world_size=1)
