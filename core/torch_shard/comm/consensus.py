"""Votes by which all ranks go on or all ranks fail: on errors, on keys that must be equal, and on booleans."""

from __future__ import annotations

import zlib

import torch

from ..errors import ShardError
from .ports import ModelPort


def agree(port: ModelPort, what: str, key: object = None, error: Exception | None = None) -> None:
    """Raise on all ranks if a rank has failed, or if `key` differs between ranks. Collective.

    Args:
        port: the sharded model whose ranks vote.
        what: the name of the operation, for error messages.
        key: an object whose repr must be equal on all ranks.
        error: the error with which the operation failed on this rank.

    Raises:
        Exception: `error` itself on a rank that has one. The other ranks raise an error of the same class that quotes its
            text (a :class:`ShardError` if the class is not one of the engine's).
        DivergenceError: another rank runs another operation, or the same operation with another `key`.
    """
    # Failures are voted on before keys are compared: a rank that failed may not know its key.
    _raise_on_all(port, what, error, any_rank(port, what, error is not None))
    _compare_keys(port, what, key)


def _raise_on_all(port: ModelPort, what: str, error: Exception | None, failed: bool) -> None:
    if error is not None and port.collectives.world == 1:
        raise error
    if not failed:
        return
    own = None if error is None else (type(error), str(error))
    answers = port.collectives.watchdog.exchange(what, own, listen=error is None)
    if error is not None:
        raise error
    rank, (kind, text) = next((r, a) for r, a in enumerate(answers) if a is not None)
    raise (kind if issubclass(kind, ShardError) else ShardError)(f"{what} failed on rank {rank}: {text}")


def _compare_keys(port: ModelPort, what: str, key: object) -> None:
    if key is not None and port.collectives.world > 1:
        port.operations.note(zlib.crc32(repr(key).encode()), f"{what} with {_shortened(repr(key))}")
        port.operations.check(what)


def met(
    port: ModelPort, what: str, key: object, error: Exception | None, sure: bool = False, alone: bool = True
) -> bool:
    """Return True if all ranks have come to read the model in the same way; False if this rank reads alone.

    Collective, unless it returns False. Arguments and errors are those of :func:`agree`. With `sure` this rank reads alone only
    if the others do something else, not if they are merely late. With ``alone=False`` it never reads alone.
    """
    note = zlib.crc32(f"reads {what}".encode()), what
    vote = port.meet(what, [note], torch.tensor([error is not None], dtype=torch.uint8, device="cpu"), sure, alone)
    if vote is None:
        if error is not None:
            raise error
        return False
    _raise_on_all(port, what, error, bool(vote.any()))
    _compare_keys(port, what, key)
    return True


def any_rank(port: ModelPort, what: str, value: bool) -> bool:
    """Return True if `value` is true on any rank. Collective.

    Raises:
        DivergenceError: another rank runs another operation.
    """
    operations = port.operations
    if port.collectives.world == 1:
        return value
    operations.note(zlib.crc32(what.encode()), what)
    vote = operations.check(what, torch.tensor([value], dtype=torch.uint8, device="cpu"))
    assert vote is not None
    return bool(vote[0])


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."
