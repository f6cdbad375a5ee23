"""``model.generate`` on a sharded model: the parameters are gathered once, before the first token.

Each forward of a sharded model is collective, and the ranks generate texts of different lengths. With gathered parameters the
ranks do not depend on each other until all of them have finished, and no parameter is sent for each token. If the full model does
not fit on a rank, units are gathered for every token, and ranks that have finished take part until all have, as transformers does
under ``synced_gpus``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_shard import Engine
from torch_shard.frontend import (
    all_read,
    any_rank,
    casts_parameters,
    engine_holding,
    free_host_bytes,
    parameter_bytes,
    precision_of,
)
from torch_shard.log import logger

ROOM = 1.25
"""The full parameters may take the free memory divided by this; the rest is for caches of keys and values."""


def generate(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``generate`` of transformers and PEFT on full parameters. Collective, with any inputs.

    A rank that calls it alone, while the others do something else, generates alone. Inside ``engine.gathered()`` nothing is
    gathered, and it is not collective.

    Raises:
        MissingRankError: some rank has not come, neither to this nor to anything else.
    """
    models = [m for m in (module, kwargs.get("assistant_model")) if isinstance(m, nn.Module)]
    engines = list(dict.fromkeys(e for e in map(engine_holding, models) if e is not None))
    if not engines:
        return stock(*args, **kwargs)
    what = f"{type(module).__name__}.generate"
    together = any(engine.world_size > 1 for engine in engines) and all_read(engines[0], what)
    if any_rank(engines[0], what, not fits(engines)) if together else not fits(engines):
        logger.warning(
            "%s: the full model does not fit beside what is in memory, so that parameters are gathered for every token.",
            what,
        )
        with autocast(engines[0]):
            return stock(*args, **{**kwargs, "synced_gpus": together})
    if kwargs.get("synced_gpus"):
        kwargs["synced_gpus"] = False  # ranks need not wait for each other
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.gathered())
        return stock(*args, **kwargs)


def autocast(engine: Engine) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast for units that are gathered in low precision.

    ``PeftModel.generate`` does not call the forward that Accelerate puts under autocast.
    """
    dtype = precision_of(engine.config.precision).param_dtype
    if dtype is None or not casts_parameters(engine):
        return contextlib.nullcontext()
    return torch.autocast(engine.device.type, dtype)


def fits(engines: list[Engine]) -> bool:
    """Return True if this rank has memory for the full parameters, as they are stored. Not collective."""
    return sum(map(parameter_bytes, engines)) * ROOM <= available(engines[0].device)


def available(device: torch.device) -> int:
    """Return how many bytes this rank may still take on `device`. Not collective."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    on_host = free_host_bytes()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # the ranks that share this machine's memory
    return sys.maxsize if on_host is None else on_host // max(ranks, 1)
