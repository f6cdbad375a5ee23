"""Whether every rank can hold the full model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torch_shard.frontend import free_host_bytes

# The share of the memory available now. The rest is for other processes, and for the gathering itself.
_SHARE = 0.5


def fits_on_every_rank(strategy: Any, optimizers: Iterable[Any] = (), averages: Iterable[torch.Tensor] = ()) -> bool:
    """Return True if every rank can hold the full parameters of the strategy's model. Collective.

    Args:
        strategy: the Trainer's strategy, in a run.
        optimizers: optimizers whose state is gathered, too.
        averages: averages of the parameters, which are gathered, too.
    """
    engine = strategy.engine
    parameters = _full_bytes(engine.model.parameters())
    states = _full_bytes(averages) + _full_bytes(
        v for o in optimizers for entries in o.state.values() for v in entries.values() if isinstance(v, torch.Tensor)
    )
    free = free_host_bytes()
    fits = free is None or (parameters + states) * strategy.num_processes <= _SHARE * free
    if engine.device.type == "cuda":  # full parameters pass through the device
        fits = fits and parameters <= _SHARE * torch.cuda.mem_get_info(engine.device)[0]
    refusals = torch.tensor(0 if fits else 1, device=engine.device)
    return int(strategy.reduce(refusals, reduce_op="sum")) == 0


def _full_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that the tensors take when full."""
    return sum(t.numel() * t.element_size() for t in tensors)
