"""What this rank hands out of one model to a rank that reads alone: its shards, and the state of its optimizers."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch

from ..comm.one_sided.partners import ShardPart
from ..comm.one_sided.service import Service
from ..comm.one_sided.versions import Versions
from ..comm.streams import streams_of
from ..errors import DivergenceError
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.served_shard import ServedShard


class ServedShards:
    """The shards of a model that this rank has (:class:`~torch_shard.comm.ports.ShardSource`).

    State of optimizers is found by its parameter and key. It changes with the parameters, within one version, so that a reader is
    admitted to both by one lock.

    Attributes:
        versions: the versions of the shards.
        flats: the flat buffers of each unit, by the unit's number.
    """

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.flats: dict[int, list[FlatBuffer]] = {}
        self._states: list[tuple[weakref.ref[Any], Any]] = []  # the optimizers, each with its state
        self._offered: tuple[weakref.ref[Service], str] | None = None

    def offer(self, service: Service, key: str) -> None:
        """Hand out the shards under `key` from now on; when the model is gone, hand out what it leaves until the ranks meet."""
        self._offered = weakref.ref(service), key
        service.offer(key, self)

    def __del__(self) -> None:
        # No `weakref.finalize`: it would refer to the parameters, and through what users attach to them to the model.
        service = None if self._offered is None else self._offered[0]()
        if service is not None and self._offered is not None:
            service.leave_behind(self._offered[1], self._without_model())

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Hand out the state of an optimizer that holds parameters of the model, from now on."""
        if not any(ref() is optimizer and state is optimizer.state for ref, state in self._states):
            others = [(ref, state) for ref, state in self._states if ref() is not optimizer]
            self._states = [*others, (weakref.ref(optimizer), optimizer.state)]

    def optimizer_states(self) -> list[Any]:
        """Return the state of each optimizer that is still there."""
        return [state for ref, state in self._states if ref() is not None]

    def met(self) -> None:
        """Forget dropped optimizers: at a collective, which all ranks have come to, the other ranks have dropped them, too."""
        if any(ref() is None for ref, _ in self._states):
            self._states = [(ref, state) for ref, state in self._states if ref() is not None]

    def shard_to_send(self, part: ShardPart, before: bool) -> torch.Tensor:
        """Return this rank's shard of what a reader wants: contiguous, on the CPU. Called in any thread.

        Args:
            part: what the reader wants.
            before: as it was before the edits that may be taken back.

        Raises:
            DivergenceError: no optimizer of this rank has the state, or several have.
        """
        flat = self.flats[part.unit][part.flat]
        if part.form == "state":
            return _sent_state(self.versions, [value._local for value in self._found(part)], part)
        served = flat.served
        if before:
            # Hazard: the copy must come behind the edit. Nothing on the host writes meanwhile: the edit has waited for its step,
            # and the next one is a change, which waits for this reader.
            _follow(self.versions, flat.memory)
            served = served._replace(memory=flat.memory_before(self.versions.edits.before))
        return _sent(self.versions, served, part)

    def has(self, part: ShardPart, own: ShardTensor) -> bool:
        """Return True if an optimizer of this rank has `own` as the state that `part` names."""
        return any(value is own for value in self._found(part))

    def _found(self, part: ShardPart) -> list[ShardTensor]:
        param = self.flats[part.unit][part.flat].params[part.param]
        entries = [state.get(param) for _, state in self._states]
        values = [entry.get(part.key) for entry in entries if isinstance(entry, dict)]
        return [value for value in values if isinstance(value, ShardTensor)]

    def _without_model(self) -> LeftShards:
        self.versions.settle = lambda: None  # the other function refers to the process groups
        left = LeftShards(self.versions)
        for unit, flats in self.flats.items():
            for number, flat in enumerate(flats):
                left.shards[unit, number] = flat.served
                for index, param in enumerate(flat.params):
                    for entries in (state.get(param) for _, state in self._states):
                        for key, value in entries.items() if isinstance(entries, dict) else ():
                            if isinstance(value, ShardTensor):
                                left.states[unit, number, index, key].append(value._local)
        return left


class LeftShards:
    """The shards of a model that this rank has dropped, which another one may still read.

    Unlike the model's parameters, they refer to no module and no process group, so that these end when the model does.
    """

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self.shards: dict[tuple[int, int], ServedShard] = {}  # by the numbers of unit and flat buffer
        self.states: dict[tuple[int, int, int, str], list[torch.Tensor]] = defaultdict(list)

    def met(self) -> None:
        """Do nothing, since all of these shards are dropped when the ranks meet."""

    def shard_to_send(self, part: ShardPart, before: bool) -> torch.Tensor:
        """See :meth:`ServedShards.shard_to_send`."""
        if before:
            raise DivergenceError("that rank dropped the model while it held edited values.")
        if part.form != "state":
            return _sent(self.versions, self.shards[part.unit, part.flat], part)
        return _sent_state(self.versions, self.states.get((part.unit, part.flat, part.param, part.key), []), part)


def _sent(versions: Versions, shard: ServedShard, part: ShardPart) -> torch.Tensor:
    _follow(versions, shard.memory)
    return shard.part(part)


def _sent_state(versions: Versions, found: list[torch.Tensor], part: ShardPart) -> torch.Tensor:
    if len(found) != 1:
        raise DivergenceError(
            f"{len(found) or 'no'} optimizers on that rank have the state {part.key!r} of this parameter, and exactly one is "
            "needed. Only optimizers that have stepped or were loaded count. Save on every rank."
        )
    _follow(versions, found[0])
    return found[0].detach().cpu().contiguous()


def _follow(versions: Versions, memory: torch.Tensor) -> None:
    """Let this thread's stream wait for the latest change of `memory`."""
    # Hazard: the thread that serves reads on a stream of its own, and the change was made on the stream that trains.
    streams_of(memory.device).wait(versions.event)
