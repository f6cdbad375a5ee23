"""Whether every rank can hold the full model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_shard import Engine
from torch_shard.frontend import free_host_bytes

__all__ = ["fits_on_every_rank", "full_bytes"]

# The share of the memory available now. The rest is for other processes, and for the gathering itself.
_SHARE = 0.5


def fits_on_every_rank(
    engine: Engine,
    optimizers: Iterable[Any],
    ranks_here: int,
    reduce: Callable[..., torch.Tensor],
    averages: Iterable[torch.Tensor] = (),
) -> bool:
    """Return True if every rank can hold full parameters, optimizer state and averages. Collective.

    Args:
        engine: the model's engine.
        optimizers: the optimizers whose state is gathered, too.
        ranks_here: the number of ranks that share this node's memory.
        reduce: a function that sums a tensor over the ranks.
        averages: averages of the parameters.
    """
    parameters = full_bytes(p for p in engine.model.parameters())
    states = full_bytes(averages) + full_bytes(
        v for o in optimizers for entries in o.state.values() for v in entries.values() if isinstance(v, torch.Tensor)
    )
    free = free_host_bytes()
    fits = free is None or (parameters + states) * max(1, ranks_here) <= _SHARE * free
    if engine.device.type == "cuda":  # full parameters pass through the device
        fits = fits and parameters <= _SHARE * torch.cuda.mem_get_info(engine.device)[0]
    refusals = torch.tensor(0 if fits else 1, device=engine.device)
    return int(reduce(refusals, reduce_op="sum")) == 0


def full_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the tensors take when full."""
    return sum(t.numel() * t.element_size() for t in tensors)
