"""Training without one of the engine's waits or events: which program shows that it is missing.

docs/streams.md lists the calls with what was found, and the tests compare. Whoever adds a call finds a program for it by::

    python -m tests.simulated.removed_waits 'unit/unit.py Unit.wait'

which runs all programs, and then each that reaches one of the calls whose text begins so, without it. It takes a while.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .programs import Scenario
from .scenarios import ALONE, HYBRID, SCENARIOS
from .sites import Site
from .streams import Pace

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
PACES: tuple[Pace, ...] = ("late", "early", "random")
PROGRAMS: dict[int, dict[str, Scenario]] = {1: ALONE, 2: SCENARIOS, 4: HYBRID}
"""By number of ranks."""

_RANKS = {"one rank": 1, "two ranks": 2, "four ranks": 4}
_ROW = re.compile(r"\| `(.+?)` \| `(.+?)` \| (.+?) \| (.+?) \|")
_SHOWN = re.compile(r"(\w+ ranks?): `([^`]+)`(?:, (early|random))?(?:, without `(\S+) (\S+): (.+)` as well)?")


# -- the list in the docs ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """What the docs say about a call.

    Attributes:
        why: what it orders.
        ranks, program, pace: a run that shows a race without the call.
        other: another call that orders the same: the race shows only if both are missing.
        kept: where no run shows a race: why the call stays.
    """

    site: Site
    why: str
    ranks: int = 0
    program: str = ""
    pace: Pace = "late"
    other: Site | None = None
    kept: str = ""


def rows() -> Iterator[Row]:
    """Yield the rows of the docs' list."""
    file = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            file = line.removeprefix("### ")
        found = _ROW.fullmatch(line)
        if found is None:
            continue
        function, call, why, without = found.groups()
        site, shown = Site(file, function, call), _SHOWN.fullmatch(without)
        if shown is None:
            assert without.startswith("kept: "), f"{PAGE.name}: {line}"
            yield Row(site, why, kept=without.removeprefix("kept: "))
        else:
            ranks, program, pace, *other = shown.groups()
            also = Site(*other) if other[0] else None
            yield Row(site, why, _RANKS[ranks], program, pace or "late", also)


# -- runs --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Outcome:
    """What a run has shown on all ranks together."""

    races: frozenset[tuple[int, str]]  # each with its rank
    sites: Mapping[Site, int]
    seconds: float


def run(program: Scenario, removed: Iterable[Site] = (), pace: Pace = "late") -> Outcome:
    """Run a program without some calls. Collective: all ranks return the same.

    Raises:
        RuntimeError: the program has failed on a rank. The others have waited for it for a while, and raise, too.
    """
    begun, error, own = time.monotonic(), "", None
    try:
        report = program.run(pace, seed=dist.get_rank(), dropped=tuple(removed))
        own = report.races + report.failures, report.sites
    except Exception as failure:
        error = f"rank {dist.get_rank()}: {failure!r}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (own, error, time.monotonic() - begun))
    if errors := [error for _, error, _ in everyone if error]:
        raise RuntimeError("\n".join(errors))
    races, sites = set(), dict[Site, int]()
    for rank, ((found, reached), _, _) in enumerate(everyone):
        races.update((rank, race) for race in found)
        for site, times in reached.items():
            sites[site] = sites.get(site, 0) + times
    return Outcome(frozenset(races), sites, everyone[0][2])


@dataclass
class Search:
    """Finds the programs that need a call. Every method is collective, and returns the same on all ranks."""

    programs: Mapping[str, Scenario]
    pace: Pace = "late"
    whole: dict[str, Outcome] = field(default_factory=dict)  # what the programs show with all calls
    without: dict[tuple[str, Site], Outcome] = field(default_factory=dict)  # and without one of them

    def sites(self) -> list[Site]:
        """Return the calls that the programs reach."""
        return sorted({site for outcome in self.whole.values() for site in outcome.sites}, key=str)

    def reaching(self, site: Site) -> list[str]:
        """Return the programs that reach a call, the shortest first."""
        names = [name for name, outcome in self.whole.items() if site in outcome.sites]
        return sorted(names, key=lambda name: self.whole[name].seconds)

    def run_without(self, name: str, site: Site) -> Outcome:
        """Return what a program shows without a call; run it only once."""
        if (name, site) not in self.without:
            self.without[name, site] = run(self.programs[name], [site], self.pace)
        return self.without[name, site]

    def witness(self, site: Site) -> str | None:
        """Return a program that shows a race without the call, if there is one."""
        return next((name for name in self.reaching(site) if self.run_without(name, site).races), None)

    def partner(self, site: Site, most: int = 3) -> tuple[str, Site] | None:
        """Return a program and another call of it, without which the call is needed. Looks at the `most` shortest programs."""
        for name in self.reaching(site)[:most]:
            for other in self.whole[name].sites:
                if other == site or self.run_without(name, other).races:
                    continue
                if run(self.programs[name], [site, other], self.pace).races:
                    return name, other
        return None


def _search(rank: int, ranks: int, port: int, prefix: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, init_method=f"tcp://127.0.0.1:{port}")
    for pace in PACES:
        search = Search(PROGRAMS[ranks], pace)
        search.whole = {name: run(program, (), pace) for name, program in search.programs.items()}
        for site in search.sites():
            if str(site).startswith(prefix):
                found = search.witness(site) or search.partner(site)
                if rank == 0:
                    print(f"{ranks} ranks, {pace}: {site}\n    {found or 'nothing shows'}", flush=True)


if __name__ == "__main__":
    for number in PROGRAMS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_search, (number, port, " ".join(sys.argv[1:])), nprocs=number)
