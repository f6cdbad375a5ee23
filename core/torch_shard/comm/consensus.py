"""Ranks go on together or fail together: votes on errors, on keys that must be equal, and on booleans."""

from __future__ import annotations

import zlib

import torch

from ..errors import ShardError
from .ports import Member

# -- together or not at all -------------------------------------------------------------------------------------------


def agree(member: Member, what: str, key: object = None, error: Exception | None = None) -> None:
    """Make sure that every rank is here, that none has failed, and that all have the same `key`. Collective.

    Args:
        member: whose ranks.
        what: the operation, for messages.
        key: anything whose repr must be equal on all ranks that have not failed.
        error: why this rank cannot go on.

    Raises:
        Exception: `error` itself where there is one; elsewhere an error of the same class (:class:`ShardError` for
            classes that are not the engine's) that quotes it.
        DivergenceError: another rank does something else, or the same with another `key`.
    """
    c, agreement = member.collectives, member.agreement
    if c.world == 1 or agreement is None:
        if error is not None:
            raise error
        return
    # The failure first, by itself: a rank that failed may not know its key.
    agreement.note(zlib.crc32(what.encode()), what)
    answer = agreement.check(what, torch.tensor([error is not None], dtype=torch.uint8, device="cpu"))
    assert answer is not None
    if answer[0]:
        told = None if error is None else (type(error), str(error))
        said = c.watch.exchange(what, told, listen=error is None)
        if error is not None:
            raise error
        rank, (kind, text) = next((r, s) for r, s in enumerate(said) if s is not None)
        raise (kind if issubclass(kind, ShardError) else ShardError)(f"{what} failed on rank {rank}: {text}")
    if key is not None:
        agreement.note(zlib.crc32(repr(key).encode()), f"{what} with {_shortened(repr(key))}")
        agreement.check(what)


def anywhere(member: Member, what: str, value: bool) -> bool:
    """Whether `value` is true on any rank. Collective.

    Raises:
        DivergenceError: another rank does something else.
    """
    agreement = member.agreement
    if member.collectives.world == 1 or agreement is None:
        return value
    agreement.note(zlib.crc32(what.encode()), what)
    answer = agreement.check(what, torch.tensor([value], dtype=torch.uint8, device="cpu"))
    assert answer is not None
    return bool(answer[0])


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
