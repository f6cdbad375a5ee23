"""Clipping parameters of any number of sharded models by one norm, as ``torch.nn.utils`` clips those of plain ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..grad_clip.checks import refuse_partials
from ..unshard.scattered_values import reduced_grad_of

if TYPE_CHECKING:
    from ..engine import Engine

__all__ = ["clip_norm", "engines_over", "limit_values"]


def clip_norm(
    engines: Iterable[Engine],
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients so that their common norm is at most `max_norm`. Collective where one of them is sharded.

    Args:
        engines: the engines that may shard the parameters, in one order on all ranks.
        parameters: parameters of any of these engines' models, or of none.
        max_norm: the limit.
        norm_type: any p, ``inf`` and 0 included.
        error_if_nonfinite: wait for the norm and raise where it is NaN or infinite.

    Returns:
        The norm before, 0-d, equal on all ranks.

    Raises:
        RuntimeError: the norm is not finite, on all ranks, before anything has changed; over one model a NonFiniteError.
        ShardError: gradients are not reduced yet (``no_sync``).
        ConfigError: parameters of several models, with some that are not sharded.
    """
    found = engines_over(engines, parameters)
    if len(found) == 1:
        # The engine takes plain parameters, too: they count with rank 0's gradients, so that all ranks scale alike.
        return found[0].clip_grad_norm_(max_norm, norm_type, parameters, error_if_nonfinite)
    own = {id(p) for engine in found for unit in engine.units for flat in unit.flats for p in flat.params}
    if found and any(p.requires_grad and id(p) not in own for p in parameters):
        raise ConfigError(
            "clipping by norm: parameters of several sharded models, with others that are not sharded (left out by "
            "ShardConfig.ignore or ShardPlugin.ignore, or of a model that is not prepared). Their gradients differ between the "
            "ranks, which would scale the shards of one parameter by different factors; clip each model on its own."
        )
    _refuse_unreduced(found, parameters)
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)


def limit_values(engines: Iterable[Engine], parameters: Sequence[torch.Tensor], value: float) -> None:
    """Limit each element of the gradients to ``[-value, value]``. Not collective; raises as :func:`clip_norm` does."""
    found = engines_over(engines, parameters)
    if len(found) == 1:
        found[0].clip_grad_value_(value, parameters)
        return
    _refuse_unreduced(found, parameters)
    torch.nn.utils.clip_grad_value_(parameters, value)


def engines_over(engines: Iterable[Engine], parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """Return the engines that shard at least one of `parameters`, each once. Not collective."""
    held = set(map(id, parameters))
    once = {id(engine): engine for engine in engines}
    return [
        engine
        for engine in once.values()
        if any(id(p) in held for unit in engine.units for flat in unit.flats for p in flat.params)
    ]


def _refuse_unreduced(engines: Iterable[Engine], parameters: Sequence[torch.Tensor]) -> None:
    for engine in engines:
        refuse_partials(engine._runtime, parameters, "clipping")
    for p in parameters:
        reduced_grad_of(p)  # raises if the gradient waits for its reduction
