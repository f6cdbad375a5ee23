"""The side of the reader: connections to the partners' services, and one read of the model's shards."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...errors import DivergenceError, MissingRankError
from ..work import caller_line
from . import wire

_BRIEF = 2.0  # seconds that an error message waits for a rank's line


class ShardPart(NamedTuple):
    """The part of a rank's shard that a reader wants.

    Attributes:
        unit, flat: the number of the unit, and that of the flat buffer in it.
        form: "stored" for the shard as it is, "sent" for what a gather would send, or "state" for optimizer state.
        start, stop: the elements of a stored shard; None for all.
        param, key: for optimizer state, the parameter's number in the flat buffer, and the state's key.
    """

    unit: int
    flat: int
    form: Literal["stored", "sent", "state"]
    start: int | None = None
    stop: int | None = None
    param: int = 0
    key: str = ""


class ModelVersion(NamedTuple):
    """One version of a model, which a reader wants.

    Attributes:
        key: the key by which all ranks know the model.
        restarts, finished, digest: the version: how many changes have made it, and the edits since then (see
            :class:`.Versions`).
        line: the line of user code that has made the latest change.
        own: full values that this rank has in place of those of that version, by the parameters' names.
    """

    key: str
    restarts: int
    finished: int
    digest: int
    line: str
    own: Mapping[str, torch.Tensor]


class Partners:
    """This rank's connections to the services of the other ranks, each made when it is needed first.

    Args:
        rank: the number of this rank.
        addresses: the address of each rank's service, by rank.
        seconds: how long a partner may take to answer.
    """

    def __init__(self, rank: int, addresses: Sequence[wire.Address], seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        # On this rank's host loopback leads to a partner even after the host has got another address.
        own = addresses[rank].host
        self._addresses = [each._replace(host="127.0.0.1") if each.host == own else each for each in addresses]
        self._links: dict[int, socket.socket] = {}
        self._readers = itertools.count()  # numbers for reads: one may run inside another

    def __len__(self) -> int:
        return len(self._addresses)

    def ask(self, rank: int, **question: Any) -> dict[str, Any]:
        """Ask the service of `rank`, and return its answer.

        Raises:
            MissingRankError: it does not answer.
        """
        with self._link_to(rank) as link:
            wire.send(link, question)
            return wire.receive(link)

    def tell(self, rank: int, **message: Any) -> None:
        """Tell the service of `rank` something that it does not answer.

        Raises:
            MissingRankError: it can't be reached.
        """
        with self._link_to(rank) as link:
            wire.send(link, message)

    def line_of(self, rank: int) -> str:
        """Return the line of user code at which `rank` is now, for messages; "" if its service does not answer at once."""
        brief = Partners(self.rank, self._addresses, _BRIEF)  # not the connection in which another thread may wait
        with contextlib.closing(brief), contextlib.suppress(MissingRankError):
            return str(brief.ask(rank, ask="presence")["line"])
        return ""

    @contextlib.contextmanager
    def _link_to(self, rank: int) -> Iterator[socket.socket]:
        link = self._links.get(rank)
        try:
            if link is None:
                link = self._links[rank] = wire.connect(self._addresses[rank], self.seconds)
                wire.send(link, {"secret": self._addresses[rank].secret, "rank": self.rank})
            yield link
        except BaseException as error:
            # Also at an interrupt: an answer that nobody has read would be taken for that of another question.
            if link is not None:
                link.close()
                self._links.pop(rank, None)
            if not isinstance(error, (OSError, EOFError)):
                raise
            raise MissingRankError(
                f"rank {self.rank} reads the model alone at {caller_line()}, and rank {rank}, which holds a part of it, does "
                f"not answer: it has stopped at an error, or its process is gone; see its log. ({error})"
            ) from error

    def close(self) -> None:
        """Close all connections."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    # -- one read -----------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def reading(self, members: Sequence[int], model: ModelVersion, issued: int) -> Iterator[Reading]:
        """Return a context in which the shards of `model` can be read from `members`.

        No rank changes its shards meanwhile.

        Args:
            members: the ranks that hold the shards; this rank may be one of them.
            model: the model, in the version that this rank has.
            issued: the number of comparisons that this rank has issued.

        Raises:
            DivergenceError: a rank has changed its shards since then, or does not come to make the changes of this one.
            MissingRankError: a rank is gone.
        """
        others = [rank for rank in members if rank != self.rank]
        reader, asked = next(self._readers), []
        try:
            version = {"model": model.key, "count": (model.restarts, model.finished), "digest": model.digest}
            question = {"ask": "admit", **version, "reader": reader, "seconds": self.seconds, "issued": issued}
            for rank in others:
                self.tell(rank, **question)
                asked.append(rank)
            try:
                answers = {rank: self._receive(rank) for rank in others}  # all of them, before any is looked at
            except BaseException:
                self.close()  # or the other answers would be taken for those of other questions
                raise
            for rank, answer in answers.items():
                self._check(rank, answer, model)
            yield Reading(self, list(members), model, reader)
        finally:
            for rank in asked:
                with contextlib.suppress(MissingRankError):
                    self.tell(rank, ask="dismiss", reader=reader)

    def _receive(self, rank: int) -> dict[str, Any]:
        with self._link_to(rank) as link:
            link.settimeout(2 * self.seconds)  # the partner itself waits for at most `seconds`
            return wire.receive(link)

    def _check(self, rank: int, answer: dict[str, Any], model: ModelVersion) -> None:
        outcome, where = answer["outcome"], f"rank {self.rank} reads the model alone at {caller_line()}"
        after = f"after {model.finished} changes of its parameters (steps, edits, loads)"
        if outcome == "ahead":
            raise DivergenceError(
                f"{where}, {after}, but rank {rank} has already made "
                f"the next one, at {answer['line']}. That rank no longer has the values that this rank would read. Read "
                "before backward or after the optimizer's step, or on every rank."
            )
        if outcome in ("behind", "stuck"):
            why = f"in {self.seconds:g} s" if outcome == "behind" else "and waits for this rank in something else"
            raise DivergenceError(
                f"{where}, {after}, the latest at {model.line}, but rank {rank} has made {answer['finished']}, the latest at "
                f"{answer['line']}, {why} (it is at {self.line_of(rank) or 'an unknown line'} now). Change parameters on every "
                "rank; one rank alone may only copy full tensors into them, read the model, and copy their old values back."
            )
        if outcome == "unknown":
            raise DivergenceError(
                f"{where}, but rank {rank} does not have this model, or no longer has it. Keep the model on every rank until "
                "all ranks have read it; make copies on every rank, too."
            )


class Reading:
    """A running one-sided read of one version of a model's shards.

    Attributes:
        own: see :class:`ModelVersion`.
        bytes_read: how many bytes have come from other ranks.
    """

    def __init__(self, partners: Partners, members: list[int], model: ModelVersion, reader: int) -> None:
        self._partners, self._members, self._reader = partners, members, reader
        self.own = model.own
        self.bytes_read = 0

    def fill(self, slots: Sequence[torch.Tensor], parts: Sequence[ShardPart]) -> None:
        """Fill the slots of the other ranks, one slot and part for each member, with their shards of a flat buffer.

        On the CPU a slot, which is contiguous, is filled in place. An empty one is not asked for.
        """
        partners = self._partners
        wanted = zip(self._members, slots, parts, strict=True)
        others = [(rank, slot, part) for rank, slot, part in wanted if rank != partners.rank and slot.numel()]
        try:
            for rank, _, part in others:  # all of them prepare at the same time
                partners.tell(rank, ask="shard", reader=self._reader, part=part._asdict())
            for rank, slot, _ in others:
                with partners._link_to(rank) as link:
                    self._fill(link, slot, rank)
        except BaseException:
            partners.close()  # or later answers would be taken for those of other questions
            raise

    def _fill(self, link: socket.socket, slot: torch.Tensor, rank: int) -> None:
        answer = wire.receive(link)
        if "error" in answer:
            raise DivergenceError(
                f"rank {self._partners.rank} reads the model alone at {caller_line()}, and rank {rank} can't hand out its part: "
                f"{answer['error']}"
            )
        if answer["nbytes"] != slot.nbytes:
            raise EOFError(f"it sends {answer['nbytes']} bytes instead of {slot.nbytes}")
        host = slot if slot.device.type == "cpu" else torch.empty_like(slot, device="cpu")
        wire.receive_into(link, host)
        if host is not slot:
            slot.copy_(host)
        self.bytes_read += slot.nbytes
