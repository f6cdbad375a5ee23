"""How much host memory there is for this process, and whether all ranks of a host fit in it together.

Memory is limited in several places at once: by the machine, and by the control groups that the process is in (a container,
a job of a scheduler), each within the next. Ranks may share all of these or some: two containers on a machine have limits of
their own and the machine's memory in common. So each rank lists its limits with an identity, and what the ranks that have one
in common need is added up.

Nothing here allocates anything.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from ..errors import HostMemoryError
from ..log import logger

__all__ = ["RESERVE", "Limit", "available", "check", "formatted", "host_identity", "limits"]

RESERVE = 1 << 30
"""Bytes that are left of each limit: for activations' copies, data loading, and what the libraries allocate as they go."""

_UNLIMITED = 1 << 60  # version 1 of control groups writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Limit:
    """One limit on this process's memory.

    Attributes:
        key: the same for all processes under this limit, and for no others.
        room: bytes that may still be allocated under it, by all of them together.
        is_machine: the machine's memory; else that of a control group.
    """

    key: str
    room: int
    is_machine: bool


def available() -> int | None:
    """Bytes of host memory that this process may still use: the smallest of its :func:`limits`. Not collective.

    None where the system tells nothing. The page cache counts as free, since the kernel gives it up when memory is needed; swap
    does not count.
    """
    return min((limit.room for limit in limits()), default=None)


def limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """All limits on this process's memory that can be read. Not collective.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    machine = host_identity(root)
    room = _machine(root)
    found = [] if room is None else [Limit(f"machine {machine}", room, is_machine=True)]
    with contextlib.suppress(OSError, ValueError):
        for folder, is_v2 in _control_groups(root):
            # The path is another one in each container; device and inode are the group's own.
            where = folder.stat()
            if (room := (_room_v2 if is_v2 else _room_v1)(folder)) is not None:
                found.append(Limit(f"group {machine} {where.st_dev} {where.st_ino}", room, is_machine=False))
    return tuple(found)


def host_identity(root: Path = Path("/")) -> str:
    """What tells this machine from others, containers or not, until it is started again: the kernel's boot id; without one,
    the host's name."""
    return _read(root / "proc/sys/kernel/random/boot_id").strip() or socket.gethostname()


def check(
    needed: int,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    remedy: str = "",
    reserve: int = RESERVE,
    known: Sequence[Limit] | None = None,
) -> None:
    """Make sure that what all ranks are about to allocate fits in their hosts' memory. Collective.

    Args:
        needed: bytes that this rank will hold more than now; what it frees in exchange is already taken off.
        gather: sends this rank's 1-D CPU tensor to all ranks; returns those of all ranks, stacked, rank by rank. None: this rank
            is alone.
        remedy: how the user can need less, as a sentence; the error ends with it.
        reserve: bytes of each limit that stay free. The largest that a rank gives counts.
        known: this rank's limits, in place of what :func:`limits` reads.

    Raises:
        HostMemoryError: on all ranks, if one host is short: what each of its ranks needs, and what there is.
    """
    known = limits() if known is None else known
    own = _pack(needed, reserve, known)
    rows = own.unsqueeze(0) if gather is None else gather(own)
    ranks = [_unpack(row) for row in rows]
    logger.debug("host memory: %s needed, available %s", formatted(needed), [formatted(limit.room) for limit in known])
    said = list(_shortages(ranks))
    if said:
        raise HostMemoryError("; ".join(said) + "." + (f" {remedy}" if remedy else ""))


def formatted(nbytes: int) -> str:
    """A number of bytes for messages: ``"1.50 GiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


# -- what the system says ---------------------------------------------------------------------------------------------


def _machine(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    # Other systems: what is free now, or at least what is installed.
    for pages in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        with contextlib.suppress(AttributeError, ValueError, OSError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    return None


def _control_groups(root: Path) -> Iterator[tuple[Path, bool]]:
    """The folders of this process's control groups that may limit memory, from its own outwards; and whether of version 2."""
    own: dict[bool, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own[True] = path
        elif "memory" in controllers.split(","):
            own[False] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        kind, _, options = system.split(" ", 2)
        is_v2 = kind == "cgroup2"
        if is_v2 not in own or not (is_v2 or (kind == "cgroup" and "memory" in options.split(","))):
            continue
        _, _, _, top, at, *_ = mount.split(" ")
        mounted = root / at.lstrip("/")
        # The mount may show a part of the tree only, from `top` on, and this process's group may be outside of it.
        group = PurePosixPath(own.pop(is_v2))
        inside = group.relative_to(top) if group.is_relative_to(top) else PurePosixPath()
        folder = mounted / inside if ".." not in inside.parts and (mounted / inside).is_dir() else mounted
        for one in (folder, *folder.parents):
            yield one, is_v2
            if one == mounted:
                break


def _room_v2(folder: Path) -> int | None:
    # Above `high` the kernel slows the group down until it has given memory back: what is pinned it can't give back.
    found = [int(text) for name in ("max", "high") if (text := _read(folder / f"memory.{name}").strip()).isdecimal()]
    if not found:
        return None
    stat = _stat(folder)
    cache = stat.get("inactive_file", 0) + stat.get("active_file", 0) + stat.get("slab_reclaimable", 0)
    return _room(min(found), int(_read(folder / "memory.current")), cache)


def _room_v1(folder: Path) -> int | None:
    limit = int(_read(folder / "memory.limit_in_bytes") or _UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    stat = _stat(folder)
    cache = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    return _room(limit, int(_read(folder / "memory.usage_in_bytes")), cache)


def _room(limit: int, used: int, cache: int) -> int:
    return max(0, limit - max(0, used - cache))


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -- what a rank tells the others -------------------------------------------------------------------------------------

_MOST = 12  # limits that a message has place for
_NAME = 64
_MESSAGE = struct.Struct(f"<qqq{_NAME}s" + "Qq" * _MOST)


@dataclass(frozen=True)
class _Rank:
    needed: int
    reserve: int
    host: str
    limits: dict[int, tuple[int, bool]]  # by digest of the key: room, and is it the machine's


def _pack(needed: int, reserve: int, known: Sequence[Limit]) -> torch.Tensor:
    tightest = sorted(known, key=lambda limit: (not limit.is_machine, limit.room))[:_MOST]
    pairs: list[int] = []
    for limit in tightest:
        digest = int.from_bytes(hashlib.blake2b(limit.key.encode(), digest_size=8).digest(), "little")
        pairs += [(digest & ~1) | limit.is_machine, limit.room]
    name = socket.gethostname().encode()[:_NAME]
    data = _MESSAGE.pack(needed, reserve, len(tightest), name, *pairs, *[0] * (2 * _MOST - len(pairs)))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpack(row: torch.Tensor) -> _Rank:
    needed, reserve, count, name, *pairs = _MESSAGE.unpack(bytes(row.tolist()))
    found = {pairs[2 * i]: (pairs[2 * i + 1], bool(pairs[2 * i] & 1)) for i in range(count)}
    return _Rank(needed, reserve, name.rstrip(b"\0").decode(errors="replace"), found)


def _shortages(ranks: Sequence[_Rank]) -> Iterator[str]:
    """A clause for each host whose ranks don't fit: its tightest limit. The same on all ranks."""
    under: dict[int, list[int]] = {}
    for number, rank in enumerate(ranks):
        for digest in rank.limits:
            under.setdefault(digest, []).append(number)
    short: dict[tuple[str, ...], tuple[int, str]] = {}
    for digest, numbers in under.items():
        # Each rank read the limit at its own moment: the smallest reading is the safe one.
        room, is_machine = min(ranks[n].limits[digest] for n in numbers)
        reserve = max(ranks[n].reserve for n in numbers)
        needed = sum(ranks[n].needed for n in numbers)
        missing = needed - max(0, room - reserve)
        if needed <= 0 or missing <= 0:
            continue
        hosts = tuple(dict.fromkeys(ranks[n].host for n in numbers))
        each = ", ".join(f"rank {n}: {formatted(ranks[n].needed)}" for n in numbers)
        limit = (
            "in the machine" if is_machine else "under the memory limit of the ranks' control group (container or job)"
        )
        text = (
            f"host {' and '.join(hosts)} is short of memory by {formatted(missing)}: offload needs {formatted(needed)} there "
            f"({each}), and {formatted(room)} are available {limit}, of which {formatted(reserve)} stay free for other uses"
        )
        if hosts not in short or missing > short[hosts][0]:
            short[hosts] = missing, text
    yield from (text for _, text in short.values())
