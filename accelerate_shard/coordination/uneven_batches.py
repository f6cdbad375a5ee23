"""``join_uneven_inputs`` with sharded models: ranks that have different numbers of batches.

Under DDP a rank that has no more batches takes part in the reductions of the others. A rank of a sharded model would also have to
take part in forwards, clipping and optimizer steps, about which it cannot know. Evaluation works, because with gathered
parameters the ranks do not depend on each other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from torch_shard import Engine
from torch_shard.errors import ConfigError
from torch_shard.frontend import exchange_texts

_UNEVEN = (
    "join_uneven_inputs: the ranks have different numbers of batches of this dataloader, and a sharded model is trained by all "
    "ranks together. Leave even_batches at True (the last batches are filled up) or set drop_last=True. In evaluation numbers of "
    "batches may differ: call model.eval() before join_uneven_inputs."
)


@contextlib.contextmanager
def even_batches_set(dataloaders: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Set ``even_batches`` of the dataloaders' batch samplers inside; None leaves them as they are. Not collective."""
    samplers = [] if even_batches is None else [s for s in map(_sampler, dataloaders) if s is not None]
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, value in zip(samplers, before, strict=True):
            sampler.even_batches = value


@contextlib.contextmanager
def join(
    models: Sequence[tuple[nn.Module, Engine]], dataloaders: Iterable[Any], active: Callable[[], Any], seconds: float
) -> Iterator[None]:
    """Allow different numbers of batches inside on ranks that only evaluate. Collective.

    Args:
        models: the sharded models that the user has named, with their engines.
        dataloaders: the prepared dataloaders; their lengths decide.
        active: a function that returns the dataloader that is being iterated over, or None.
        seconds: the time for which a rank without a batch waits for the others at the end.

    Raises:
        ConfigError: on all ranks, inside, from the first forward over a dataloader whose lengths differ, of a model that was in
            training mode here; on a rank without a batch at the end. Other dataloaders behave as without this.
    """
    uneven = _uneven(dataloaders) if models else []
    if not uneven:
        yield
        return
    engines = dict.fromkeys(e for _, e in models)
    if any(model.training for model, _ in models):
        with _refusing(list(engines), uneven, active, seconds):
            yield
        return
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.gathered())
        yield


@contextlib.contextmanager
def _refusing(
    engines: Iterable[Engine], uneven: list[Any], active: Callable[[], Any], seconds: float
) -> Iterator[None]:
    """Refuse forwards over one of the dataloaders `uneven` inside.

    A rank without a batch has no forward, and hears at the end whether the others have refused one. They don't wait for it.
    """
    refused = False
    empty = any(_length(loader) == 0 for loader in uneven)

    def refuse(module: nn.Module, args: Any) -> None:
        nonlocal refused
        if (loader := active()) is not None and any(_is_of(loader, other) for other in uneven):
            refused = True
            raise ConfigError(_UNEVEN)

    handles = [engine.model.register_forward_pre_hook(refuse, prepend=True) for engine in engines]
    ended = False
    try:
        yield
        ended = True
    finally:
        for handle in handles:
            handle.remove()
        waits = ended and empty and not refused
        ranks, what = list(range(dist.get_world_size())), "Accelerator.join_uneven_inputs"
        _, texts = exchange_texts(ranks, "accelerate_shard/join", "refused" * refused, seconds, what, wait=waits)
        if "refused" in texts.values():
            raise ConfigError(_UNEVEN)


def _is_of(loader: Any, other: Any) -> bool:
    """Return True if `loader` is `other`, or what ``skip_first_batches`` has made of it."""
    if loader is other:
        return True
    wanted, sampler = _sampler(other), getattr(loader, "batch_sampler", None)
    while sampler is not None and sampler is not wanted:
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler is not None


def _uneven(dataloaders: Iterable[Any]) -> list[Any]:
    """Return the dataloaders whose lengths differ between the ranks. Collective.

    Loaders without a length are of iterable datasets, whose batches Accelerate makes even itself.
    """
    loaders = list(dataloaders)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [_length(loader) for loader in loaders])
    if len({len(lengths) for lengths in everyone}) > 1:  # some ranks have prepared other dataloaders
        return loaders
    return [loader for loader, *found in zip(loaders, *everyone, strict=True) if len(set(found)) > 1]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, AttributeError):
        return None


def _sampler(loader: Any) -> Any:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if hasattr(sampler, "even_batches") else None
