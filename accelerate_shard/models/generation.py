"""``model.generate`` on a sharded model: the parameters are gathered once, for the whole of it.

Each forward of a sharded model is a collective operation, and ranks generate texts of different lengths. Gathered once, the
ranks do not depend on each other until all of them have finished, and no parameter is sent for each token. Where the whole model
does not fit on a rank, every token gathers unit by unit, and ranks that have finished take part until all have, which is what
transformers' ``synced_gpus`` does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_shard.frontend import Runtime, anywhere, gathered, precision_of
from torch_shard.log import logger

from .method_overrides import runtime_of

__all__ = ["generate"]

ROOM = 1.25
"""The whole parameters may take what is free divided by this; the rest is for caches of keys and values."""


def generate(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``generate`` of transformers and PEFT, on whole parameters. Collective: call it on all ranks, with any inputs.

    Inside ``engine.gathered()`` nothing is gathered, and it is not collective.

    Raises:
        MissingRankError: some rank does not call it.
    """
    runtimes: list[Runtime] = []
    for model in (module, kwargs.get("assistant_model")):
        runtime = runtime_of(model) if isinstance(model, nn.Module) else None
        if runtime is not None and runtime not in runtimes:
            runtimes.append(runtime)
    if not runtimes:
        return stock(*args, **kwargs)
    what = f"{type(module).__name__}.generate"
    several = any(runtime.collectives.world > 1 for runtime in runtimes)
    if several and anywhere(runtimes[0], what, not fits(runtimes)):
        logger.warning(
            "%s: the whole model does not fit beside what is in memory, so that parameters are gathered again for every token.",
            what,
        )
        with autocast(runtimes[0]):
            return stock(*args, **{**kwargs, "synced_gpus": True})
    if kwargs.get("synced_gpus"):
        kwargs["synced_gpus"] = False  # ranks need not wait for each other
    with contextlib.ExitStack() as stack:
        for runtime in runtimes:
            stack.enter_context(gathered(runtime))
        return stock(*args, **kwargs)


def autocast(runtime: Runtime) -> contextlib.AbstractContextManager[Any]:
    """What units gathered in low precision are computed with. ``PeftModel.generate`` goes past the forward that Accelerate
    puts under autocast."""
    dtype = precision_of(runtime.config.precision).param_dtype
    if dtype is None or not any(unit.casts for unit in runtime.units):
        return contextlib.nullcontext()
    return torch.autocast(runtime.collectives.device.type, dtype)


def fits(runtimes: list[Runtime]) -> bool:
    """Whether this rank has memory for the whole parameters, as they are stored. Not collective."""
    needed = sum(
        flat.layout.numel * flat.shard.element_size()
        for runtime in runtimes
        for unit in runtime.units
        if unit.gathers
        for flat in unit.flats
    )
    return needed * ROOM <= available(runtimes[0].collectives.device)


def available(device: torch.device) -> int:
    """Bytes that this rank may still take on `device`. Not collective."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil  # type: ignore[import-untyped]  # Accelerate needs it, too

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # which share this machine's memory
    return int(psutil.virtual_memory().available) // max(ranks, 1)
