"""``torch-shard plan``: will a model fit, with which settings, and which of these is fastest."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config.bytes_text import read_bytes
from ..config.precision import for_autocast
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, UnavailableError
from ..plan.devices import DEVICES, LINK_FORM, Device, device, link
from ..plan.hardware import OUTSIDE, Hardware
from ..plan.memory_estimate import mib
from ..plan.paste import PLACES, lines_for
from ..plan.report import report
from ..plan.search_results import Search
from ..plan.settings_search import search_step
from ..utils.html_page import check_path
from .output import print_json

_ROWS = 12  # of the table that is printed
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}
# The link between the devices of a node that usually comes with each.
_WITHIN = {"a100": "nvlink3", "h100": "nvlink4", "h200": "nvlink4", "b200": "nvlink5", "mi300x": "infinity-fabric"}


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "plan",
        help="find settings with which a model fits",
        usage="torch-shard plan train.py --gpus 8 [options] [-- argument ...]\n"
        "       torch-shard plan --model NAME --batch 4 --seq 2048 --gpus 8 [options]",
        description="Find the settings with which a step of a script, or of a causal language model, fits the memory of each "
        "device, and the fastest of them. A script is run on the CPU up to its first step, which is traced on tensors without "
        "values. Exit code 0: something fits; 1: nothing does; 2: error.",
    )
    parser.add_argument("script", nargs="?", help="a script that trains; what follows -- are its own arguments")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument(
        "--model",
        help="instead of a script: a folder with a config.json of transformers, or a name in the hub's local cache",
    )
    parser.add_argument("--batch", type=int, help="with --model: sequences of each rank in a step")
    parser.add_argument("--seq", type=int, help="with --model: tokens of a sequence")
    parser.add_argument("--gpus", type=int, required=True, help="devices of a node")
    parser.add_argument("--nodes", type=int, default=1, help="nodes (default: 1)")
    parser.add_argument("--memory", help="of one device, such as 80GiB (default: that of the device's data sheet)")
    parser.add_argument("--margin", type=float, default=0.05, help="part of the memory that stays free (default: 0.05)")
    parser.add_argument(
        "--precision",
        choices=["bf16", "fp16", "fp32"],
        help="with --model: bf16 and fp16 are autocast (default: bf16)",
    )
    parser.add_argument("--optimizer", choices=list(_OPTIMIZERS), help="with --model (default: adamw)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)}, or a JSON file (default: h100)")
    parser.add_argument("--link", help=f"within a node: {LINK_FORM}")
    parser.add_argument("--link-between-nodes", default="ib-ndr400", help="as --link (default: ib-ndr400)")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures of a step (plots need matplotlib)")
    parser.set_defaults(run=run)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of ``torch-shard``, and those of a script, which follow ``--``."""
    given = list(argv)
    at = given.index("--") if given[:1] == ["plan"] and "--" in given else len(given)
    return given[:at], given[at + 1 :]


def run(arguments: argparse.Namespace) -> int:
    """Print what was found, and return the exit code."""
    _check(arguments)
    name = arguments.device
    figures = Device.from_file(name) if name.endswith(".json") else device(name)
    memory = int(figures.memory_bytes) if arguments.memory is None else read_bytes("--memory", arguments.memory)
    path = None if arguments.html is None else check_path("--html", arguments.html)
    on_cpu = figures.name == "cpu"
    within = _WITHIN.get(figures.name, "gloo-local" if on_cpu else "pcie4")
    hardware = Hardware.of(
        memory,
        arguments.gpus * arguments.nodes,
        arguments.gpus,
        device=figures,
        on="cpu" if on_cpu else "cuda",
        intra=link(arguments.link or within),
        inter=link(arguments.link_between_nodes),
        margin=arguments.margin,
    )
    autocast = None
    if arguments.script is None:
        precision = arguments.precision or "bf16"
        autocast = precision if precision in _AUTOCAST else None
        found = _plan_model(arguments, hardware, autocast)
    else:
        from ..launch.planned_script import plan_script

        found = plan_script(arguments.script, arguments.script_arguments, hardware, arguments.module)
    best = found.estimates[0] if found.estimates[0].fits else None
    lines = {} if best is None else lines_for(best.candidate, autocast)
    if path is not None:
        path.write_text(report(found, f"torch-shard plan: {_title(arguments)}", lines), encoding="utf-8")
    if arguments.json:
        print_json(
            {
                "model": arguments.model,
                "script": arguments.script,
                "budget": found.budget,
                "states": found.states,
                "candidates": [
                    dataclasses.asdict(each) | {"settings": str(each.candidate)} for each in found.estimates
                ],
                "best": lines or None,
                "shortage": found.shortage if best is None else None,
                "notes": [dataclasses.asdict(note) for note in found.notes],
            }
        )
        return 0 if best is not None else 1
    print(f"budget {mib(found.budget)} MiB: {mib(memory)} less {arguments.margin:.0%}", end="")
    print(f" and {mib(OUTSIDE)} MiB for the context and the communicators" * (not on_cpu))
    print(f"parameters, gradients and optimizer state under full_shard: {mib(found.states)} MiB on each rank\n")
    print(found.table(most=_ROWS))
    print("\nSeconds are for ranking, by the figures of data sheets.")
    if found.notes:
        places: dict[str, dict[str, None]] = {}
        for note in found.notes:
            places.setdefault(f"{note.value:g}", {})[note.line] = None
        assumed = "; ".join(f"{value}, at {', '.join(lines)}" for value, lines in places.items())
        print(f"Values that the step reads were assumed to be {assumed}.")
    if best is None:
        print(f"\n{found.shortage}")
        return 1
    for kind, text in lines.items():
        print(f"\n# {PLACES[kind]}\n{text}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    if (arguments.script is None) == (arguments.model is None):
        raise ConfigError("give a script or --model, one of them.")
    for name in ("batch", "seq", "gpus", "nodes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}.")
    for name in ("batch", "seq", "precision", "optimizer"):
        value = getattr(arguments, name)
        if value is not None and arguments.model is None:
            raise ConfigError(f"--{name} belongs to --model: a script sets it itself.")
        if value is None and arguments.model is not None and name in ("batch", "seq"):
            raise ConfigError(f"--{name} belongs to --model: it is missing.")
    if arguments.script is None:
        if arguments.script_arguments:
            raise ConfigError("arguments that follow -- are a script's, and there is none.")
    elif not arguments.module and not Path(arguments.script).is_file():
        raise ConfigError(f"there is no script {arguments.script!r}.")


def _title(arguments: argparse.Namespace) -> str:
    """Return what was planned, in a line without a path."""
    where = f"{arguments.nodes} x {arguments.gpus}" if arguments.nodes > 1 else arguments.gpus
    if arguments.script is not None:
        return f"{Path(arguments.script).name}, {where} {arguments.device}"
    return (
        f"{Path(arguments.model).name}, {arguments.batch} x {arguments.seq} tokens a rank, {where} {arguments.device}"
    )


def _plan_model(arguments: argparse.Namespace, hardware: Hardware, autocast: str | None) -> Search:
    model = _model(arguments.model)
    optimizer = _OPTIMIZERS[arguments.optimizer or "adamw"](model.parameters(), lr=1e-4)
    dtype = None if autocast is None else _AUTOCAST[autocast]
    words = model.config.vocab_size

    def step(model: Any, batch: int) -> None:
        tokens = torch.randint(0, words, (batch, arguments.seq), device=hardware.on)
        with torch.autocast(hardware.on, dtype) if dtype is not None else contextlib.nullcontext():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    config = ShardConfig()
    if dtype is not None:
        config = for_autocast(config, model, dtype, "--precision")
    return search_step(model, step, hardware, batch=arguments.batch, config=config, optimizers=[optimizer])


def _model(name: str) -> Any:
    """Return a model on meta, with random weights that are never made."""
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError("--model needs transformers, which is not installed.") from error
    try:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config).train()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"--model {name}: no causal language model of transformers, in a folder with a config.json or in the local cache: "
            f"{str(error).splitlines()[0]}"
        ) from error
