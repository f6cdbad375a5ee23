"""``strategy="auto"``: rank 0 plans the script that this program runs, and all ranks take the settings that the plan finds.

The plan is made by ``torch-shard plan`` in another process, which runs the script up to its first step, without a device.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from typing import Any

import torch
from torch import nn

from .. import errors
from ..comm.mesh import device_for, ranks_of_node
from ..comm.process_groups import group_timeout, ranks_of
from ..comm.rendezvous import exchange_texts
from ..comm.streams import streams_of
from ..config.offload import Offload
from ..config.shard_config import ShardConfig
from ..errors import BudgetError, ConfigError, ShardError, UnavailableError
from ..log import logger
from ..offload.memory_limits import available
from ..plan.devices import device_called
from ..plan.memory_estimate import mib

PLANNING = "TORCH_SHARD_PLANNING"
"""The variable of the environment that is set where a script is planned."""

_LONGEST = 3600.0  # seconds that a plan may take; the other ranks wait a little longer for it
_CHOSEN = ("strategy", "prefetch", "shard_size")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The settings that fit and are the fastest.

    Attributes:
        config: the engine's settings.
        layers: the layers whose activations are to be recomputed; True for all layers that repeat.
        offloaded: True if the inputs of these layers are to wait in host memory.
        smaller: descriptions of the fastest other settings that take less memory.
    """

    config: ShardConfig
    layers: bool | tuple[str, ...] = False
    offloaded: bool = False
    smaller: tuple[str, ...] = ()


def choose_settings(model: nn.Module, config: ShardConfig, mesh: Any, recomputes: bool) -> Chosen:
    """Return `config` with the settings that fit and are the fastest, as the plan of this script finds. Collective.

    A model that doesn't train has no step to plan, and gets ``full_shard``, which takes the least memory.

    Args:
        model, config, mesh: the arguments of ``shard()``. The mesh must have all ranks.
        recomputes: True if layers of the model recompute activations already.

    Raises (on all ranks):
        BudgetError: nothing fits.
        ConfigError: this program can't be planned: it is no script, or shards over a part of the ranks.
        TraceError: the script can't be traced.
    """
    if not any(p.requires_grad for p in model.parameters()):
        return Chosen(dataclasses.replace(config, strategy="full_shard", memory=None))
    world = len(ranks_of())
    size = getattr(mesh, "size", None)
    if isinstance(mesh, (tuple, list)) or getattr(mesh, "ndim", 1) > 1 or (callable(size) and size() != world):
        raise ConfigError(
            f'strategy="auto" is for one model over all {world} ranks; name a strategy for a part of them.'
        )
    device = device_for(model, mesh)
    answer: dict[str, Any] = {}
    if world == 1 or torch.distributed.get_rank() == 0:
        try:
            answer = _planned(config, device, world)
        except Exception as error:  # the other ranks wait for the result
            kind = type(error).__name__ if isinstance(error, ShardError) else "ShardError"
            answer = {"error": kind, "text": str(error)}
    if world > 1:
        _, texts = exchange_texts(
            list(range(world)),
            "torch_shard/auto",
            json.dumps(answer),
            max(_LONGEST + 60, group_timeout(device)),
            "the plan of rank 0",
        )
        answer = json.loads(texts[0])
    if "error" in answer:
        raise getattr(errors, answer["error"])(f'strategy="auto": {answer["text"]}')
    candidate = answer["candidate"]
    offload = None if candidate["offload"] is None else Offload(**candidate["offload"])
    chosen = dataclasses.replace(config, memory=None, offload=offload, **{name: candidate[name] for name in _CHOSEN})
    logger.info('strategy="auto" has chosen: %s (%s MiB)', answer["settings"], mib(answer["nbytes"]))
    smaller = tuple(answer["smaller"])
    if recomputes:
        return Chosen(chosen, smaller=smaller)
    layers = candidate["checkpointing"]
    return Chosen(
        chosen, layers if isinstance(layers, bool) else tuple(layers), candidate["activation_offload"], smaller
    )


def _planned(config: ShardConfig, device: torch.device, world: int) -> dict[str, Any]:
    """Return the best candidate of ``torch-shard plan --json`` for this program, with "smaller" as :attr:`Chosen.smaller`."""
    if PLANNING in os.environ:
        raise errors.TraceError(
            "the script starts processes that shard; only what it does in its own process can be planned."
        )
    of_node = min(ranks_of_node() or world, world)
    if world % of_node:
        raise ConfigError(f"{world} ranks are not as many on each node, where {of_node} fit; set LOCAL_WORLD_SIZE.")
    memory = config.memory if config.memory is not None else _memory(device, of_node)
    command = [sys.executable, "-m", "torch_shard", "plan", "--json", "--memory", f"{memory}B"]
    command += ["--gpus", str(of_node), "--nodes", str(world // of_node)]
    name = streams_of(device).device_name()
    known = None if name is None else device_called(name)
    if known is not None or name is None:
        command += ["--device", "cpu" if known is None else known.name]
    code, stdout, stderr = _run([*command, *_program()])
    if code not in (0, 1):
        logger.warning("the plan of this script has failed:\n%s", stderr)
        last = stderr.strip().splitlines()[-1:] or ["no message"]
        raise errors.TraceError(
            f"{last[0].removeprefix('torch-shard: ')} Name a strategy, or remove what can't be planned."
        )
    found = json.loads(stdout)
    best: dict[str, Any] = found["candidates"][0]
    if code == 1:
        raise BudgetError(found["shortage"])
    smaller = (each for each in found["candidates"] if each["nbytes"] < best["nbytes"])  # those that fit come first
    best["smaller"] = [f"{each['settings']} ({mib(each['nbytes'])} MiB)" for each in itertools.islice(smaller, 2)]
    return best


def _run(command: list[str]) -> tuple[int, str, str]:
    """Run a command; return its exit code, its output and its error output."""
    pipe = subprocess.PIPE
    # In a session of its own, so that the copies in which the script runs end with it.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=_LONGEST)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise errors.TraceError(
                f"the plan of this script has not ended within {_LONGEST:g} s. Name a strategy, or see where the script waits: "
                "torch-shard plan."
            ) from None
    return process.returncode, stdout, stderr


def _program() -> list[str]:
    """Return the arguments of ``torch-shard plan`` for the program that runs here."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), "--", *sys.argv[1:]]
    if path is None or not os.path.isfile(path):
        raise ConfigError("only a script can be planned. Elsewhere torch_shard.plan.search finds settings for a step.")
    return [path, "--", *sys.argv[1:]]


def _memory(device: torch.device, of_node: int) -> int:
    on_device = streams_of(device).total_memory()
    if on_device is not None:
        return on_device
    free = available()
    if free is None:
        raise UnavailableError(
            'how much memory there is can\'t be found out; pass it, ShardConfig(strategy="auto", memory="20GiB").'
        )
    return free // of_node
