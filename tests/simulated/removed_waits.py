"""Removes the engine's waits and events one at a time, and looks which training program shows that one is missing.

``python -m tests.simulated.removed_waits`` runs all programs on two ranks, which takes a while, and prints what it finds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from .memory import ENOUGH
from .programs import Scenario
from .sites import Site
from .streams import Pace

PACES: tuple[Pace, ...] = ("late", "early", "random")


def everywhere(own: Any) -> list[Any]:
    """Return what each rank gives. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


@dataclass(frozen=True)
class Outcome:
    """What a run has shown on any rank; equal on all of them."""

    races: frozenset[tuple[int, str]]
    sites: Mapping[Site, int]
    seconds: float

    @property
    def is_cut_short(self) -> bool:
        """True if a rank has stopped to look for further races."""
        counts = [rank for rank, _ in self.races]
        return any(counts.count(rank) >= ENOUGH for rank in set(counts))


def outcome(scenario: Scenario, pace: Pace = "late", dropped: Iterable[Site] = ()) -> Outcome:
    """Run a scenario without some calls. Collective: all ranks return the same.

    Raises:
        RuntimeError: the scenario has failed on a rank. The others give up when they have waited for it for a while.
    """
    begun, error, report = time.monotonic(), "", None
    try:
        report = scenario.run(pace, seed=dist.get_rank(), dropped=tuple(dropped))
    except Exception as failure:
        error = f"rank {dist.get_rank()}: {failure!r}"
    reports = everywhere((report and (report.races + report.failures, report.sites), error, time.monotonic() - begun))
    errors = [error for _, error, _ in reports if error]
    if errors:
        raise RuntimeError("\n".join(errors))
    sites: dict[Site, int] = {}
    for (_, reached), _, _ in reports:
        for site, times in reached.items():
            sites[site] = sites.get(site, 0) + times
    races = frozenset((rank, race) for rank, ((found, _), _, _) in enumerate(reports) for race in found)
    return Outcome(races, sites, reports[0][2])


@dataclass
class Search:
    """Which programs of one number of ranks show what is missing. Every method is collective, and returns the same on all ranks."""

    scenarios: Mapping[str, Scenario]
    pace: Pace = "late"
    whole: dict[str, Outcome] = field(default_factory=dict)  # what the programs show with all waits
    without: dict[tuple[str, Site], Outcome] = field(default_factory=dict)

    def run_whole(self) -> None:
        """Run all programs with all waits."""
        for name, scenario in self.scenarios.items():
            self.whole[name] = outcome(scenario, self.pace)

    def sites(self) -> list[Site]:
        """Return the calls that were reached, in the order of the source."""
        return sorted({site for found in self.whole.values() for site in found.sites}, key=str)

    def reaching(self, site: Site) -> list[str]:
        """Return the programs that reach a call, the shortest first."""
        return sorted(
            (n for n, found in self.whole.items() if site in found.sites), key=lambda n: self.whole[n].seconds
        )

    def run_without(self, name: str, *removed: Site) -> Outcome:
        """Run a program without some calls."""
        if len(removed) > 1:
            return outcome(self.scenarios[name], self.pace, removed)
        key = name, removed[0]
        if key not in self.without:
            self.without[key] = outcome(self.scenarios[name], self.pace, removed)
        return self.without[key]

    def witness(self, site: Site) -> str | None:
        """Return a program that shows a race without `site`; None if none does."""
        return next((name for name in self.reaching(site) if self.run_without(name, site).races), None)

    def partner(self, site: Site, most: int = 4) -> tuple[Site, str] | None:
        """Return another call without which the removal of `site` shows more, and the program that shows it."""
        for name in self.reaching(site)[:most]:
            for other in self.whole[name].sites:
                if other == site:
                    continue
                alone = self.run_without(name, other)
                if not alone.is_cut_short and self.run_without(name, site, other).races - alone.races:
                    return other, name
        return None
