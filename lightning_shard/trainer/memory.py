"""Does a whole copy of the model on every rank fit in memory?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from torch_shard import Engine
from torch_shard.frontend import free_host_bytes

__all__ = ["fits_on_every_rank", "whole_bytes"]

# Of what is available now. The rest is for what other processes, and the gathering itself, take meanwhile.
_SHARE = 0.5


def fits_on_every_rank(
    engine: Engine,
    optimizers: Iterable[Any],
    ranks_here: int,
    reduce: Callable[..., torch.Tensor],
    averages: Iterable[torch.Tensor] = (),
) -> bool:
    """Whether each rank can hold whole parameters, optimizer state and averages. Collective; the same answer on all.

    Args:
        engine: of the model.
        optimizers: whose state is gathered too.
        ranks_here: ranks that share this machine's memory.
        reduce: sums a tensor over the ranks.
        averages: of the parameters.
    """
    parameters = whole_bytes(p for p in engine.model.parameters())
    states = whole_bytes(averages) + whole_bytes(
        v for o in optimizers for entries in o.state.values() for v in entries.values() if isinstance(v, torch.Tensor)
    )
    free = free_host_bytes()
    fits = free is None or (parameters + states) * max(1, ranks_here) <= _SHARE * free
    if engine.device.type == "cuda":  # whole parameters pass through the device
        fits = fits and parameters <= _SHARE * torch.cuda.mem_get_info(engine.device)[0]
    refusals = torch.tensor(0 if fits else 1, device=engine.device)
    return int(reduce(refusals, reduce_op="sum")) == 0


def whole_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors when whole."""
    return sum(t.numel() * t.element_size() for t in tensors)
