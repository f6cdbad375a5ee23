"""The part of :mod:`optim` with 2 Gloo ranks: AdamW, Muon, memory within a step, steps within backward.

As in `train.py`, all engines live in the same processes and take turns, another one first each round;
memory is measured with one engine per process. A step lies between two barriers and has ended when
its slowest rank has.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from engines import LABELS, decay_groups, wrap
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from train import CONFIG, LR, MIB, SMALL, batch, build, finish, libc, markdown, peak, settle, spawn, start

__all__ = ["IMPLEMENTATIONS", "reason", "report_in_backward", "report_memory", "report_muon", "report_rank46"]

CPU = torch.device("cpu")
HALF = "half"  # the floor: each process steps plain tensors with its part of the elements
NAMES = {**LABELS, HALF: "plain tensors of half the size", "alone": "unsharded, one process steps"}
MUON = ("fsdp2", "ours")  # FSDP1's flat slices are not matrices, and DDP steps as the unsharded model does
IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
}
# 99M of 100M parameters are the matrices of fourteen blocks.
MUON_CONFIG = GPTConfig(layers=14, width=768, heads=12, context=128, vocab=256)
ORDINARY, IN_BACKWARD = "backward, then step", "step in backward"

Step = Callable[[], Any]


def reason(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def nothing() -> None:
    """Stand in for the step of a process that waits."""


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor, whoever sharded it."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def built(name: str, config: GPTConfig, args: argparse.Namespace) -> tuple[nn.Module, list[tuple[str, int]]]:
    """Return the GPT under an engine, with gradients, and the plain parameters' names and dimensions, in order."""
    torch.manual_seed(0)
    plain = GPT(config)
    shapes = [(key, p.dim()) for key, p in plain.named_parameters()]
    model, _ = wrap(name, plain, plain.blocks, CPU)
    model(*batch(0, dist.get_rank(), args.batch, config, CPU)).backward()
    for p in model.parameters():
        if p.grad is not None:  # FSDP1: this rank holds nothing of it
            p.grad.fill_(1e-3)
    return model, shapes


def half_parameters(config: GPTConfig) -> Iterable[Tensor]:
    """Yield plain parameters with one rank's part of the elements, and their gradients."""
    with torch.device("meta"):
        plain = GPT(config)
    for p in plain.parameters():
        part = nn.Parameter(torch.full((math.ceil(p.numel() / dist.get_world_size()),), 0.02))
        part.grad = torch.full_like(part, 1e-3)
        yield part


# -- AdamW, 46M parameters --------------------------------------------------------------------------


def adamw_step(name: str, implementation: str, config: GPTConfig, args: argparse.Namespace) -> Step:
    options = IMPLEMENTATIONS[implementation]
    if name == HALF:
        with torch.device("meta"):
            dims = [p.dim() for p in GPT(config).parameters()]
        groups = decay_groups(half_parameters(config), dims)
        return torch.optim.AdamW(groups, lr=LR, **options).step
    if name == "alone" and dist.get_rank() > 0:
        return nothing
    model, shapes = built(name, config, args)
    groups = decay_groups(model.parameters(), (dim for _, dim in shapes))
    optimizer = torch.optim.AdamW(groups, lr=LR, **options)

    def step() -> None:
        assert model is not None  # an engine lives as long as its model
        optimizer.step()

    return step


def rank46(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    config = SMALL if args.tiny else CONFIG
    steps = {
        f"{name},{implementation}": adamw_step(name, implementation, config, args)
        for name in ("alone", HALF, *args.engines)
        for implementation in ("default", "fused")
    }
    finish(rank, folder, take_turns(steps, args.rounds, warm=3))


def take_turns(steps: dict[str, Step], rounds: int, warm: int = 1) -> dict[str, Any]:
    """Return the wall seconds of every step on its slowest rank, by round, or why a step was refused."""
    result: dict[str, Any] = {}
    for key, step in steps.items():
        error = ""
        try:
            for _ in range(warm):
                step()
        except Exception as caught:
            error = reason(caught)
        errors: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        result[key] = {"refused": next(e for e in errors if e)} if any(errors) else []
    able = [key for key in steps if result[key] == []]
    for turn in range(rounds):
        first = turn % len(able)  # no engine always follows the same one
        for key in able[first:] + able[:first]:
            gc.collect()
            dist.barrier()
            begun = time.perf_counter()
            steps[key]()
            result[key].append(time.perf_counter() - begun)
            dist.barrier()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {key: result[key] for key in able})
    for key in able:
        result[key] = [max(turn) for turn in zip(*(times[key] for times in everywhere), strict=True)]
    return result


def ratio(result: dict[str, Any], key: str, to: str, part: float) -> str:
    """Return the median, within a round, of a step's time relative to a part of another's."""
    if "refused" in result[key] or "refused" in result[to]:
        return ""
    return f"{statistics.median(a / (b * part) for a, b in zip(result[key], result[to], strict=True)):.2f}"


def milliseconds(times: Any) -> str:
    if "refused" in times:
        return "refused"
    low, middle, high = (t * 1e3 for t in (min(times), statistics.median(times), max(times)))
    return f"{low:.1f} **{middle:.1f}** {high:.1f}"


def footnotes(result: dict[str, Any]) -> None:
    refused = {key: times["refused"] for key, times in result.items() if "refused" in times}
    if refused:
        print("\nRefused:")
        for key, error in refused.items():
            name, _, implementation = key.partition(",")
            print(f"- {NAMES.get(name, name)}{', ' + implementation if implementation else ''}: {error}")


def report_rank46(args: argparse.Namespace) -> None:
    result = spawn(rank46, args)
    print(
        f"{size(SMALL if args.tiny else CONFIG)} parameters, {args.ranks} Gloo ranks with one thread each, AdamW's step "
        f"alone, wall time, {args.rounds} rounds (min, median, max; ratios are medians within a round)\n"
    )
    part, rows = 1 / args.ranks, []
    for name in ("alone", HALF, *args.engines):
        cells = [NAMES[name]]
        for kind in ("default", "fused"):
            key = f"{name},{kind}"
            cells += [milliseconds(result[key]), ratio(result, key, f"alone,{kind}", part)]
        rows.append(cells)
    print(
        markdown(
            "engine | step ms, default | of half the unsharded step | step ms, fused | of half the unsharded step", rows
        )
    )
    footnotes(result)


def size(config: GPTConfig) -> str:
    with torch.device("meta"):
        return f"{sum(p.numel() for p in GPT(config).parameters()) / 1e6:.1f}M"


# -- Muon -------------------------------------------------------------------------------------------


def muon_step(name: str, config: GPTConfig, args: argparse.Namespace) -> Step:
    """Muon for the blocks' matrices, AdamW for the rest, as Muon's documentation says."""
    if name == "alone" and dist.get_rank() > 0:
        return nothing
    model, shapes = built(name, config, args)
    pairs = list(zip(model.parameters(), shapes, strict=True))
    matrices = [p for p, (key, dim) in pairs if key.startswith("blocks.") and dim == 2]
    chosen = {id(p) for p in matrices}
    rest = [(p, dim) for p, (_, dim) in pairs if id(p) not in chosen]

    def make() -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(decay_groups([p for p, _ in rest], [dim for _, dim in rest]), lr=LR),
        ]

    optimizers: list[torch.optim.Optimizer] = []

    def step() -> None:
        assert model is not None  # an engine lives as long as its model
        if not optimizers:
            optimizers.extend(make())  # here, so that a refusal to make them is one of the step
        for optimizer in optimizers:
            optimizer.step()

    return step


def muon(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    config = SMALL if args.tiny else MUON_CONFIG
    steps = {name: muon_step(name, config, args) for name in muon_engines(args)}
    finish(rank, folder, take_turns(steps, muon_rounds(args)))


def muon_engines(args: argparse.Namespace) -> list[str]:
    return ["alone", *(name for name in args.engines if name in MUON)]


def muon_rounds(args: argparse.Namespace) -> int:
    return max(1, args.rounds // 5)


def report_muon(args: argparse.Namespace) -> None:
    result = spawn(muon, args)
    print(
        f"{size(SMALL if args.tiny else MUON_CONFIG)} parameters, {args.ranks} Gloo ranks with one thread each, Muon for the "
        f"blocks' matrices and AdamW for the rest, both steps, wall time, {muon_rounds(args)} rounds (min, median, max)\n"
    )
    rows = [[NAMES[name], milliseconds(result[name]), ratio(result, name, "alone", 1.0)] for name in muon_engines(args)]
    print(markdown("engine | both steps ms | of the unsharded steps", rows))
    footnotes(result)


# -- memory within a step ---------------------------------------------------------------------------


def start_measured(rank: int, args: argparse.Namespace, folder: str) -> GPTConfig:
    """Begin a process whose resident size is that of its tensors: freed blocks from 1 MiB on go back to the system."""
    start(rank, args, folder)
    libc().mallopt(-3, MIB)  # M_MMAP_THRESHOLD
    return SMALL if args.tiny else CONFIG


def memory(rank: int, args: argparse.Namespace, folder: str) -> None:
    config = start_measured(rank, args, folder)
    result: dict[str, Any] = {}
    model, shapes = built(args.engine, config, args)
    for label, options in IMPLEMENTATIONS.items():
        groups = decay_groups(model.parameters(), (dim for _, dim in shapes))
        optimizer = torch.optim.AdamW(groups, lr=LR, **options)
        above: list[int] = []
        try:
            # The same gradients again and again: what the engine let go of after a backward would hide what a step takes.
            for _ in range(4):
                base = settle(CPU)
                optimizer.step()
                above.append(peak(CPU) - base)
        except Exception as caught:
            result[label] = {"refused": reason(caught)}
            continue
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        state = [t for own in optimizer.state.values() for t in own.values() if isinstance(t, Tensor)]
        held = (sum(local(t).numel() * t.element_size() for t in tensors) for tensors in (grads, state))
        result[label] = [max(above[1:]), *held]  # the first makes the state
        del optimizer, grads, state
    ranks: list[Any] = [None] * args.ranks
    dist.all_gather_object(ranks, result)
    for label, values in result.items():
        if "refused" not in values:
            result[label] = [max(column) for column in zip(*(r[label] for r in ranks), strict=True)]
    finish(rank, folder, result)


def report_memory(args: argparse.Namespace) -> None:
    results = {name: spawn(memory, with_engine(args, name)) for name in args.engines}
    print(
        f"{size(SMALL if args.tiny else CONFIG)} parameters, {args.ranks} Gloo ranks: peak of an AdamW step after the first, "
        "above what is resident before it, most of three steps and of all ranks\n"
    )
    rows = []
    for name, result in results.items():
        measured = [
            "refused" if "refused" in result[label] else f"{result[label][0] / MIB:.1f}" for label in IMPLEMENTATIONS
        ]
        held = next(
            ([f"{v / MIB:.1f}" for v in values[1:]] for values in result.values() if "refused" not in values), []
        )
        rows.append([LABELS[name], *measured, *held])
    columns = " | ".join(f"peak MiB, {label}" for label in IMPLEMENTATIONS)
    print(markdown(f"engine | {columns} | one rank's gradients MiB | its state MiB", rows))
    footnotes({f"{name},{label}": values for name, result in results.items() for label, values in result.items()})


def with_engine(args: argparse.Namespace, name: str) -> argparse.Namespace:
    return argparse.Namespace(**{**vars(args), "engine": name})


# -- steps within backward --------------------------------------------------------------------------


def whole_step(order: str, config: GPTConfig, args: argparse.Namespace) -> Callable[[], None]:
    """Return a training step without clipping, whose optimizer steps in or after backward."""
    import torch_shard

    torch.manual_seed(0)
    model = GPT(config)
    engine = torch_shard.shard(model)
    dims = [p.dim() for p in model.parameters()]
    optimizer = torch.optim.AdamW(decay_groups(model.parameters(), dims), lr=LR)
    if order == IN_BACKWARD:
        engine.step_in_backward(optimizer)  # type: ignore[attr-defined]
    data = batch(0, dist.get_rank(), args.batch, config, CPU)

    def step() -> None:
        model(*data).backward()
        if order == ORDINARY:
            optimizer.step()
            optimizer.zero_grad()

    return step


def order_times(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    config = SMALL if args.tiny else CONFIG
    steps = {order: whole_step(order, config, args) for order in args.orders}
    finish(rank, folder, take_turns(steps, order_rounds(args), warm=2))


def order_rounds(args: argparse.Namespace) -> int:
    return max(2, args.rounds // 2)


def order_memory(rank: int, args: argparse.Namespace, folder: str) -> None:
    config = start_measured(rank, args, folder)
    # As in train.py: a plain model of the same size makes the libraries allocate their work space, and the engine's
    # own first allocations are made too.
    warm = build("alone", config, CPU, LR)
    for turn in range(2):
        warm.step(*batch(turn, rank, args.batch, config, CPU))
    del warm
    for _ in range(2):
        whole_step(args.engine, SMALL, args)()
    base = settle(CPU)
    step = whole_step(args.engine, config, args)
    step()
    settle(CPU)
    for _ in range(3):
        step()
    ranks: list[Any] = [None] * args.ranks
    dist.all_gather_object(ranks, (peak(CPU) - base, settle(CPU) - base))
    finish(rank, folder, [max(column) for column in zip(*ranks, strict=True)])


def report_in_backward(args: argparse.Namespace) -> None:
    import torch_shard

    there = hasattr(torch_shard.Engine, "step_in_backward")
    args.orders = [ORDINARY, IN_BACKWARD] if there else [ORDINARY]
    times = spawn(order_times, args)
    used = {order: spawn(order_memory, with_engine(args, order)) for order in args.orders}
    print(
        f"{size(SMALL if args.tiny else CONFIG)} parameters, {args.ranks} Gloo ranks with one thread each, torch_shard, AdamW, "
        f"no clipping: whole steps, {order_rounds(args)} rounds (min, median, max). Memory is that above what the "
        "process held before the model, most of all ranks\n"
    )
    rows = [
        [
            order,
            milliseconds(times[order]),
            ratio(times, order, ORDINARY, 1.0),
            *(f"{value / MIB:.1f}" for value in used[order]),
        ]
        for order in args.orders
    ]
    print(markdown("order | step ms | of the ordinary order's | peak MiB in steps | idle MiB", rows))
    if not there:
        print("\nRefused: this torch_shard has no Engine.step_in_backward.")
    footnotes(times)
