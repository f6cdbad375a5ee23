"""Refusals of nonlinear operations (clipping, a step) on partially accumulated gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import ShardError
from ..runtime.runtime import Runtime


def refuse_partials(runtime: Runtime, parameters: Iterable[torch.Tensor] | None, what: str) -> None:
    """Raise if `what`, an operation that is not linear in gradients, would use partially accumulated ones. Not collective.

    Args:
        runtime: the engine's runtime.
        parameters: the parameters whose gradients are used, of any models; None for all.
        what: the operation, for the message.

    Raises:
        ShardError: on all ranks; every backward of one of them since zero_grad() ran under no_sync().
    """
    flats = [flat for flat in runtime.flats if flat.gradients.accumulation.partial]
    chosen = set(map(id, parameters)) if flats and parameters is not None else None
    with torch._C.DisableTorchFunctionSubclass():
        for flat in flats:
            for i, p in enumerate(flat.params):
                if (chosen is None or id(p) in chosen) and flat.gradients.accumulation.is_partial(i):
                    raise ShardError(
                        f"rank {p._spec.world_rank}: {what} can't use the gradient of {p._spec.name}: every backward since "
                        "zero_grad() that added to it ran under no_sync(). It is already the mean over the ranks, where each "
                        "rank of DistributedDataParallel would have its own. Run the last backward, with its forward, outside "
                        "no_sync()."
                    )
