"""The service of one rank: it hands out the rank's shards to partners that ask, and says what the rank's main thread does.

A thread waits for connections, and one more serves each partner that has connected. Both sleep unless a partner asks.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ...errors import ShardError
from ...log import logger
from ...utils.thread_frames import frames_of_threads
from ..ports import ShardSource
from ..work import caller_line
from . import wire
from .partners import ShardPart

if TYPE_CHECKING:
    from .versions import Versions

# Where a thread waits that computes nothing: the names of packages, as they begin.
_WAITS = (
    "torch.distributed.",
    "torch_shard.comm.",
    "accelerate.utils.operations",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.plugins.collectives",
    "lightning_fabric.utilities.distributed",
    "lightning_fabric.plugins.collectives",
)


@dataclass(eq=False)
class _Admitted:
    """A partner's read that was admitted to one version of a model.

    Attributes:
        model: the key of the model.
        versions: the versions of the model. If another model has the key now, its versions are others.
        before: see :class:`.Admission`.
    """

    model: str
    versions: Versions
    before: bool = False


class Service:
    """The service of one rank's shards to its partners, for all engines over one set of process groups.

    Attributes:
        address: the address at which the service listens.
        lock: protects :attr:`issued` and :attr:`promised`.
        issued: the number of comparisons that this rank has issued.
        joined: the number of the latest comparison to which all ranks must come before this rank changes parameters.
        reads: True if this rank has come to its latest comparison to read, and may read the same version once more.
        promised: the latest comparison in which a partner reads alone: this rank has promised to say so when it comes there.
        served: the time at which a partner was served last, by ``time.monotonic()``.
        awaited: the ranks that wait for a change which this rank has still to make.
        collective: the collective in which this rank waits: its channel's name and members, and its number; None if it does not.
    """

    def __init__(self, rank: int) -> None:
        """Start to listen, as `rank` of the engines' ranks."""
        self.rank = rank
        server, self.address = wire.listen()
        self.lock = threading.Lock()
        self.issued = self.promised = self.joined = 0
        self.reads = False
        self.awaited: set[int] = set()
        self.collective: tuple[str, tuple[int, ...], int] | None = None
        self.served = 0.0
        self._ended = threading.Event()  # the rank's script has ended, or it has left the group
        self._sources: dict[str, weakref.ref[ShardSource]] = {}
        # What is left of models that this rank has dropped since the ranks last met.
        self._left: dict[str, ShardSource] = {}
        self._gone: set[str] = set()  # the keys of those that were dropped before
        self._offered = threading.Condition()
        self._main = threading.get_ident()  # the thread that trains
        self.farewells: set[int] = set()  # the ranks that have said goodbye to this one
        self._farewell = threading.Condition()
        _SocketThread(server, "torch_shard service", _accept, server, weakref.ref(self)).start()
        weakref.finalize(self, _close, server).atexit = False

    def offer(self, key: str, source: ShardSource) -> None:
        """Serve the shards of a model, which all ranks know under `key`. The model is not kept alive."""
        with self._offered:
            self._sources[key] = weakref.ref(source)
            self._offered.notify_all()

    def withdraw(self, key: str) -> None:
        """Serve the shards of a model no more."""
        self._sources.pop(key, None)

    def leave_behind(self, key: str, source: ShardSource) -> None:
        """Serve and keep what is left of a model that this rank has dropped, until the ranks meet: another may still read it."""
        if key in self._sources:
            self._left[key] = source

    def met(self) -> None:
        """Note that all ranks have come to a collective, so that nobody reads a model that this rank has dropped before."""
        self._left.clear()
        for key, ref in list(self._sources.items()):
            source = ref()
            if source is not None:
                source.met()
            elif key not in self._left:  # the garbage collector may run meanwhile
                self._sources.pop(key, None)
                self._gone.add(key)

    def leave(self) -> list[ShardSource]:
        """Note that the rank's script does not come to another collective; return the models that are served."""
        self._ended.set()
        return [source for key in list(self._sources) if (source := self._source(key)) is not None]

    def _source(self, key: str) -> ShardSource | None:
        found = self._sources.get(key)
        return None if found is None else found() or self._left.get(key)

    # -- what a partner may ask ---------------------------------------------------------------------------------
    def converse(self, link: socket.socket) -> None:
        """Answer the questions of one partner until it closes the connection."""
        admitted: dict[int, _Admitted] = {}  # by the numbers that the partner has given its reads
        try:
            hello = wire.receive(link)
            if not hmac.compare_digest(str(hello.get("secret")), self.address.secret):
                return
            while True:
                request = wire.receive(link)
                self._answer(link, request, admitted, hello["rank"])
        except (OSError, EOFError):
            pass  # the partner is gone, or has closed
        finally:
            for each in admitted.values():
                each.versions.dismiss(each)
            link.close()

    def _answer(
        self, link: socket.socket, request: dict[str, Any], admitted: dict[int, _Admitted], partner: int
    ) -> None:
        kind = request["ask"]
        if kind == "whereabouts":
            for_partner = self._waits_for(partner, request["issued"])
            state, place = self._whereabouts(
                request["comparison"], request["insist"], request["sure"], request["place"], for_partner
            )
            wire.send(link, {"state": state, "place": place})
        elif kind == "admit":
            self._admit(link, request, admitted, partner)
        elif kind == "shard":
            self._send_shard(link, request, admitted)
            self.served = time.monotonic()
        elif kind == "dismiss":
            leaving = admitted.pop(request["reader"], None)
            if leaving is not None:
                leaving.versions.dismiss(leaving)
        elif kind == "presence":
            line = caller_line(frames_of_threads().get(self._main))
            known = {"issued": self.issued, "reads": self.reads, "left": self._ended.is_set()}
            wire.send(link, {**known, "place": self._waits_in(), "line": line})
        elif kind == "farewell":
            with self._farewell:
                self.farewells.add(request["sender"])
                self._farewell.notify_all()

    def _admit(
        self, link: socket.socket, request: dict[str, Any], admitted: dict[int, _Admitted], partner: int
    ) -> None:
        key, seconds = request["model"], request["seconds"]
        with self._offered:  # this rank may still be in the shard() from which the partner has returned
            self._offered.wait_for(lambda: key in self._sources or key in self._gone, seconds)
        source = self._source(key)
        if source is None:
            wire.send(link, {"outcome": "unknown", "finished": 0, "line": ""})
            return
        self.served = time.monotonic()
        reader = _Admitted(key, source.versions)

        def waits_for_it() -> bool:  # asked while this rank has not made the version yet
            self.awaited.add(partner)
            # The reader comes to no comparison while it waits for the answer.
            return self.joined > request["issued"]

        try:
            answer = source.versions.admit(reader, tuple(request["count"]), request["digest"], seconds, waits_for_it)
        finally:
            self.awaited.discard(partner)
        if answer.outcome == "admitted":
            reader.before = answer.before
            admitted[request["reader"]] = reader
        wire.send(link, {"outcome": answer.outcome, "finished": answer.finished, "line": answer.line})

    def _send_shard(self, link: socket.socket, request: dict[str, Any], admitted: dict[int, _Admitted]) -> None:
        reader = admitted.get(request["reader"])
        source = None if reader is None else self._source(reader.model)
        try:
            # A model that has been dropped since then has left its versions, which readers lock.
            if reader is None or source is None or source.versions is not reader.versions:
                raise ShardError("the model is gone there, or may change meanwhile.")
            with torch.inference_mode(False), torch.no_grad():
                shard = source.shard_to_send(ShardPart(**request["part"]), reader.before)
        except Exception as error:  # the reader must hear of it, and this thread must not end
            logger.debug("rank %d can't serve a read: %s", self.rank, error)
            known = isinstance(error, ShardError)
            wire.send(link, {"error": str(error) if known else f"{type(error).__name__}: {error}"})
            return
        wire.send(link, {"nbytes": shard.nbytes})
        wire.send_tensor(link, shard)

    def _waits_for(self, partner: int, issued: dict[str, int]) -> bool:
        """Return True if this rank waits in a collective which `partner` has not begun, with the numbers that it has `issued`."""
        name, members, number = self.collective or ("", (), 0)
        return partner in members and issued.get(name, 0) < number

    def _whereabouts(self, comparison: int, insist: bool, sure: bool, seen: str, for_partner: bool) -> tuple[str, str]:
        """Return what the main thread does, and where it waits, for a partner that waits in a comparison.

        "here": this rank has issued that comparison. "away": it has not, and it has promised that its message there will say
        that the partner reads alone. It promises if the partner insists, if the main thread still waits where the partner has
        `seen` it, if it waits in a collective that the partner has not begun (`for_partner`), if its script has ended, or,
        unless `sure`, if it has promised before. "waiting": the main thread waits for something else. "busy": it computes.

        With `sure`, a wait in one of the engine's own collectives counts as "busy", because the main thread will not stay there.
        """
        place = self._waits_in()
        if sure and place.startswith("torch_shard."):
            place = ""
        with self.lock:
            if self.issued >= comparison:
                return "here", ""
            waits = bool(place) and place == seen
            if insist or waits or for_partner or self._ended.is_set() or (self.promised >= comparison and not sure):
                self.promised = max(self.promised, comparison)
                return "away", ""
        return ("waiting", place) if place else ("busy", "")

    def _waits_in(self) -> str:
        """Return the place in which the main thread waits for other ranks; "" if it does not."""
        frame = frames_of_threads().get(self._main)
        while frame is not None and frame.f_globals.get("__name__") == "threading":
            frame = frame.f_back
        if frame is None:
            return "gone"
        name = frame.f_globals.get("__name__", "")
        return f"{name}:{frame.f_lineno}" if name.startswith(_WAITS) or f"{name}." in _WAITS else ""

    # -- goodbye ------------------------------------------------------------------------------------------------
    def wait_for_farewells(self, ranks: set[int], seconds: float) -> set[int]:
        """Wait for at most `seconds` until `ranks` have said goodbye; return those that have not."""
        with self._farewell:
            self._farewell.wait_for(lambda: ranks <= self.farewells, seconds)
            return ranks - self.farewells


class _SocketThread(threading.Thread):
    """A thread that serves a socket until it is closed."""

    def __init__(self, served: socket.socket, name: str, function: Callable[..., None], *args: Any) -> None:
        super().__init__(target=function, args=args, name=name, daemon=True)
        self._socket = served

    def stop(self) -> None:
        """Close the socket, and wait for the thread. Test suites stop daemon threads so; Lightning's fails on other ones."""
        _close(self._socket)
        self.join()


def _accept(server: socket.socket, service: weakref.ref[Service]) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:
            return  # closed
        found = service()
        if found is None:
            link.close()
            return
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _SocketThread(link, "torch_shard partner", found.converse, link).start()
        del found


def _close(link: socket.socket) -> None:
    # A thread that waits for a socket is woken by a shutdown, not by closing it.
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    link.close()
