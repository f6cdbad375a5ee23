"""The limits on this process's host memory, and a check that all ranks of a host fit in it together.

Memory is limited in several places at once: by the machine, and by the control groups that the process is in (a container,
a job of a scheduler), each within the next. Ranks may share all of these or some: two containers on a machine have limits of
their own and the machine's memory in common. So each rank lists its limits with an identity, and what the ranks that have one
in common need is added up.

Nothing here allocates anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..comm.collectives import Collectives
from ..errors import HostMemoryError
from ..log import logger

RESERVE = 1 << 30
"""Bytes that are left of each limit: for activations' copies, data loading, and what the libraries allocate as they go."""

_MESSAGE = 4096  # bytes of a rank's message about its limits; a limit takes about 100
_REMEDY = (
    "Build the model on the meta device, so that it takes no memory beside its shards; keep parameters on disk "
    "(Offload(nvme=..., nvme_params=True)); use more hosts; or leave offload out where the devices have room."
)


class Limit(NamedTuple):
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
    """Return the bytes of host memory that this process may still use, the smallest of its :func:`limits`. Not collective.

    Return None where the system tells nothing. The page cache counts as free, since the kernel gives it up when memory is
    needed; swap does not count.
    """
    return min((limit.room for limit in limits()), default=None)


def limits(root: Path = Path("/")) -> tuple[Limit, ...]:
    """Return the limits on this process's memory: the machine's, and those of its control groups. Not collective.

    Args:
        root: the directory that has ``proc`` and ``sys``.
    """
    # The kernel's boot id is the same in all containers.
    machine = _read(root / "proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    found = []
    with contextlib.suppress(AttributeError, ValueError, OSError):
        found.append(Limit(machine, _machine(root), is_machine=True))
    for top, own in _own_groups(root):
        folder = top / own.lstrip("/")
        # A container may see a part of the groups only: those that are not there limit nothing that can be read.
        for group in (folder, *folder.parents):
            with contextlib.suppress(ValueError, OSError):
                if (room := _room(group)) is not None:
                    where = group.stat()  # in each container the path is another one
                    found.append(Limit(f"{machine} {where.st_dev} {where.st_ino}", room, is_machine=False))
            if group == top:
                break
    return tuple(found)


def check(needed: int, c: Collectives) -> None:
    """Raise where what all ranks are about to allocate does not fit in their hosts' memory. Collective.

    Args:
        needed: bytes that this rank will hold more than now; what it frees in exchange is already taken off.
        c: the collectives of the ranks.

    Raises:
        HostMemoryError: on all ranks, if one host is short. It says what each of the host's ranks needs, and what there is.
    """
    if c.backend == "fake":  # no rank answers
        return
    known = limits()
    logger.debug("host memory: %s needed, available %s", formatted(needed), [formatted(limit.room) for limit in known])
    text = json.dumps([needed, socket.gethostname(), known[:32]]).encode().ljust(_MESSAGE)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    ranks = [json.loads(bytes(row.tolist())) for row in c.all_ranks.all_gather(own, "the set-up of offload")]
    if short := list(_shortages(ranks)):
        raise HostMemoryError(f"{'; '.join(short)}. {_REMEDY}")


def formatted(nbytes: int) -> str:
    """Return a number of bytes as text: ``"1.50 GiB"``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


# -- what the system says ---------------------------------------------------------------------------------------------


def _machine(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # other systems: what is installed


def _own_groups(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the top of each hierarchy of control groups that may limit memory, and this process's group in it."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers:
            yield root / "sys/fs/cgroup", own
        elif "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory", own


# Of version 2 and version 1: the files with limits, that with what is used, and what of `memory.stat` is page cache. Above `high`
# the kernel slows the group down until it has given memory back: what is pinned it can't give back.
_VERSIONS = (
    (("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def _room(group: Path) -> int | None:
    for names, used, cached in _VERSIONS:
        if found := [int(text) for name in names if (text := _read(group / name).strip()).isdecimal()]:
            stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            cache = sum(int(stat.get(name, 0)) for name in cached)
            return max(0, min(found) - max(0, int(_read(group / used)) - cache))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# -- what the ranks need together -------------------------------------------------------------------------------------


def _shortages(ranks: Sequence[tuple[int, str, Sequence[tuple[str, int, bool]]]]) -> Iterator[str]:
    """Yield a clause for each limit that is too low for the ranks under it; the same on all ranks.

    Args:
        ranks: the bytes that each rank needs, its host, and its limits, by rank.
    """
    under: dict[str, list[tuple[int, Limit]]] = {}
    for number, (_, _, known) in enumerate(ranks):
        for limit in known:
            under.setdefault(limit[0], []).append((number, Limit(*limit)))
    for seen in under.values():
        # Each rank read the limit at its own moment: the smallest reading is the safe one.
        room = min(limit.room for _, limit in seen)
        needed = sum(ranks[number][0] for number, _ in seen)
        missing = needed - max(0, room - RESERVE)
        if needed > 0 and missing > 0:
            hosts = " and ".join(dict.fromkeys(ranks[number][1] for number, _ in seen))
            each = ", ".join(f"rank {number}: {formatted(ranks[number][0])}" for number, _ in seen)
            group = "under the memory limit of the ranks' control group (container or job)"
            yield (
                f"host {hosts} is short of memory by {formatted(missing)}: offload needs {formatted(needed)} there ({each}), and "
                f"{formatted(room)} are available {'in the machine' if seen[0][1].is_machine else group}, of which "
                f"{formatted(RESERVE)} stay free for other uses"
            )
