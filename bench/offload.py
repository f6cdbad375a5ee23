"""Offload on one GPU: tokens per second beside FSDP2 with CPUOffloadPolicy and DeepSpeed's ZeRO-3 offload, device memory, how
long the GPU waits, what the machine would allow, and the largest models that fit.

    python bench/offload.py              one GPU: GPTs of 1.1B and 6.7B parameters, sequences of 2048
    python bench/offload.py --sizes      only the table of sizes, from plans: needs no GPU
    python bench/offload.py --try 13B    take two steps with models of these sizes
    python bench/offload.py --smoke      a tiny model on the CPU, to try the script

The engines take turns, several steps in a row each. They live in one process where host memory allows it; else each turn is
a process of its own, one behind the other. What a turn leaves in the background is waited for within it. AdamW, clipping by
norm. DeepSpeed takes part where it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import engines  # noqa: F401 (puts the examples on the path)
import torch
from gpt import GPT
from offload_steps import LABELS, LOW, MODELS, compare, find_out, plan_of
from train import markdown, spawn, spread

from torch_shard.offload import memory_limits

GIB, GB = 2**30, 1e9
ADAM = 28
"""Bytes of host memory a parameter: of fp32 value, gradient and two moments, all read, all but the gradient written."""
CAST = 6  # fp32 read and bf16 written
WIDEN = 6  # the other way round


def activations(model: str, batch: int) -> int:
    """Of a step, as Korthikanti et al. (2022) count them, 34 bytes an element of the residual stream in each layer, the matrix of
    attention not kept; and logits in bf16, in fp32 and as probabilities."""
    config = MODELS[model]
    return batch * config.context * (34 * config.width * config.layers + 10 * config.vocab)


def numel(model: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(MODELS[model]).parameters())


# -- steps of a model -------------------------------------------------------------------------------------------------


def measure(args: argparse.Namespace) -> None:
    """Steps of one model under all engines, and what the machine would allow."""
    machine: dict[str, float] = spawn(find_out, args)
    tokens = args.batch * MODELS[args.model].context
    print(f"\n### {args.model}: {numel(args.model) / 1e9:.2f}B parameters, {tokens} tokens a step\n", flush=True)
    found, together = together_or_apart(args)
    print(markdown(*rows(args, found, tokens)))
    where = "In one process" if together else "Each turn in a process of its own"
    print(f"\n{where}; {args.rounds} rounds of {args.steps} steps.\n")
    print(floor(args.model, tokens, machine))


def together_or_apart(args: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], bool]:
    """The engines' measurements, and whether all lived in one process."""
    room = memory_limits.available()
    needed = sum(plan_of(args.model, "offload").predicted.host for _ in args.engines)
    if len(args.engines) == 1 or room is None or needed < room - memory_limits.RESERVE:
        return spawn(compare, args), True
    found: dict[str, dict[str, Any]] = {}
    for turn in range(args.rounds):
        first = turn % len(args.engines)
        for name in args.engines[first:] + args.engines[:first]:
            own = spawn(compare, argparse.Namespace(**{**vars(args), "engines": [name], "rounds": 1}))[name]
            known = found.setdefault(name, own)
            if known is not own:
                known["wall"] += own["wall"]
                known["peak"] = max(known["peak"], own["peak"])
    return found, False


def rows(args: argparse.Namespace, found: dict[str, dict[str, Any]], tokens: int) -> tuple[str, list[list[str]]]:
    """The table's head and lines."""
    units = plan_of(args.model, "offload").predicted.gathered_peak
    lines = []
    for name, own in found.items():
        ratio = ""
        if "fsdp2" in found:
            pairs = zip(found["fsdp2"]["wall"], own["wall"], strict=True)
            ratio = f"{statistics.median(peer / ours for peer, ours in pairs):.2f}"
        trace, kept = own.get("trace"), own.get("activations")
        lines.append(
            [
                LABELS[name],
                spread(own["wall"]),
                f"{tokens / statistics.median(own['wall']):.0f}",
                ratio,
                f"{own['peak'] / GIB:.2f}" if own["peak"] else "",
                f"{(units + kept + GB) / GIB:.2f}" if kept is not None else "",
                f"{trace['idle']:.1%}" if trace else "",
                f"{trace['crossing']:.1%}" if trace else "",
                f"{own['loss'][0]:.3f} to {own['loss'][-1]:.3f}",
            ]
        )
    head = (
        "engine | step s (min, median, max) | tokens/s | times FSDP2's | peak GiB on the device | "
        "two units + activations + 1 GB, GiB | of the step without a kernel | of that, copies ran in | loss"
    )
    return head, lines


def floor(model: str, tokens: int, machine: dict[str, float]) -> str:
    """What a step takes at least, from what this machine was measured to move and compute.

    The host updates parameters beside the next forward; clipping needs all gradients first. So a step is the longer of forward
    and update, and backward behind it. Parameters cross before each, gradients in backward, in bf16, and the host widens them.
    """
    count = numel(model)
    nbytes = ADAM + CAST
    update = nbytes * count / machine["host"]
    said = [
        f"Host memory moves {machine['host'] / GB:.1f} GB/s ({machine['threads']} threads): the update of {nbytes} bytes a "
        f"parameter ({ADAM} without the copy in bf16) takes {update:.3f} s at least."
    ]
    if "to" not in machine:
        return said[0] + "\n\nNo GPU here: neither the link nor computation was measured, so no step is predicted."
    forward = 2 * count * tokens / machine["compute"]
    there = LOW.itemsize * count / machine["both"]  # each way, in forward and again in backward
    back = LOW.itemsize * count / machine["both"]
    widening = WIDEN * count / machine["host"]
    step = max(forward, update, there) + max(2 * forward, there, back, widening)
    said.append(
        f"The link moves {machine['to'] / GB:.1f} GB/s to the device, {machine['from'] / GB:.1f} from it, "
        f"{machine['both'] / GB:.1f} each way at once: parameters take {there:.3f} s, twice, gradients {back:.3f} s, "
        f"and {widening:.3f} s to be widened on the host. "
        f"Products in bf16 run at {machine['compute'] / 1e12:.0f} TFLOPS: forward takes {forward:.3f} s, backward "
        f"{2 * forward:.3f} s."
    )
    said.append(
        "Predicted step: max(forward, update, parameters) + max(backward, parameters, gradients, widening) = "
        f"{step:.3f} s, {tokens / step:.0f} tokens/s."
    )
    return "\n".join(said)


# -- sizes ------------------------------------------------------------------------------------------------------------


def sizes(args: argparse.Namespace) -> None:
    """What would fit, from plans made on meta; and whether it did, for the sizes that are to be tried."""
    room = memory_limits.available()
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    lines = []
    for model in [name for name in MODELS if name != "tiny" or args.smoke]:
        b, on_disk = (plan_of(model, "offload", disk).predicted for disk in (None, args.disk or os.sep))
        kept = activations(model, args.batch)
        device, host = b.device_peak + kept, b.host
        fits = [
            "" if limit is None else "yes" if needed + spare <= limit else "no"
            for needed, spare, limit in ((device, GB, memory), (host, memory_limits.RESERVE, room))
        ]
        plain = plan_of(model, "none").predicted
        lines.append(
            [
                model,
                f"{numel(model) / 1e9:.2f}",
                f"{(plain.device_peak + kept) / GIB:.1f}",
                f"{b.device_peak / GIB:.2f} + {kept / GIB:.1f}",
                fits[0],
                f"{host / GIB:.1f}",
                fits[1],
                f"{(on_disk.host_peak - on_disk.gradients) / GIB:.1f} + {on_disk.disk / GIB:.1f}",
                tried(args, model) if model in args.tries else "",
            ]
        )
    there = "unknown" if room is None else f"{room / GIB:.1f} GiB"
    print(f"\n### Sizes: {args.batch} sequences; host memory here {there}", end="")
    print(f", device memory {memory / GIB:.1f} GiB\n" if memory else ", no GPU\n")
    print(
        markdown(
            "model | parameters, 10^9 | without offload: device GiB | device GiB, parameters and gradients + activations | "
            "fits | host GiB | fits | with state on disk: host GiB + disk GiB | tried",
            lines,
        )
    )
    print("\nPredicted from plans, bf16 with fp32 masters and AdamW, one rank; nothing was allocated for it.")


def tried(args: argparse.Namespace, model: str) -> str:
    """Two steps, in a process of its own."""
    settings = {"model": model, "engines": ["offload"], "rounds": 1, "steps": 1, "warm_up": 1}
    try:
        own = spawn(compare, argparse.Namespace(**{**vars(args), **settings}))["offload"]
    except Exception as error:  # whatever it was, it is the outcome
        return "failed: " + str(error).strip().splitlines()[-1].replace("|", "/")[:160]
    return f"{own['wall'][-1]:.2f} s a step, {own['peak'] / GIB:.1f} GiB on the device"


# -- the parent -------------------------------------------------------------------------------------------------------


def choice(parser: argparse.ArgumentParser, option: str, given: str, known: dict[str, Any]) -> list[str]:
    """The names in a list that a user has given."""
    names = [name for name in given.split(",") if name]
    for name in names:
        if name not in known:
            parser.error(f"--{option}: {name!r} is not one of {', '.join(known)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default="1B,7B", help=f"some of: {','.join(MODELS)}")
    parser.add_argument("--engines", help=f"some of: {','.join(LABELS)}")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=4, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=3, help="of an engine in a row")
    parser.add_argument("--warm-up", type=int, default=1, help="turns that are not counted, in each process")
    parser.add_argument("--threads", type=int, default=0, help="of torch; default its own choice")
    parser.add_argument("--disk", help="directory for torch_shard's optimizer state")
    parser.add_argument(
        "--try", dest="tries", default="", help="sizes to take two steps with; no other steps are taken"
    )
    parser.add_argument("--sizes", action="store_true", help="only the table of sizes")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    if args.smoke:
        args.models, args.threads, args.batch = "tiny", args.threads or 1, 2
        args.rounds, args.steps = min(args.rounds, 2), min(args.steps, 2)
    args.ranks = 1
    models = choice(parser, "models", args.models, MODELS)
    args.tries = choice(parser, "try", args.tries, MODELS)
    if args.engines:
        args.engines = choice(parser, "engines", args.engines, LABELS)
    else:
        has_deepspeed = importlib.util.find_spec("deepspeed") is not None and not args.smoke
        args.engines = ["offload", "fsdp2", *["deepspeed"] * has_deepspeed]
    if args.threads:
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    steps = not args.sizes and not args.tries
    if not args.smoke and not torch.cuda.is_available() and (steps or args.tries):
        parser.error("no GPU here: --smoke runs a tiny model on the CPU, --sizes needs none")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() and not args.smoke else "no GPU"
    print(
        f"bf16, fp32 masters, AdamW, clipping; {where}, {os.cpu_count()} CPU cores; torch {torch.__version__}, "
        f"Python {platform.python_version()}, {date.today()}"
    )
    todo: list[Callable[[argparse.Namespace], None]] = [*[measure] * steps, *[sizes] * (args.smoke or not steps)]
    for model in models if steps else models[:1]:
        args.model = model
        for what in todo:
            what(args)
            sys.stdout.flush()
    if steps and not args.smoke:
        sizes(args)


if __name__ == "__main__":
    main()
