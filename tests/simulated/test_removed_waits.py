"""The checker is checked: it sees when a call that orders the device's work is missing. docs/streams.md says in which run."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulated.removed_waits import PAGE, PROGRAMS, Row, rows, run
from tests.simulated.scenarios import OFFLOADED, QUICK, SPECIAL
from tests.simulated.sites import sites
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

BLOCKS = "a copy that blocks"  # is no call of its own kind in the source

LIST = {str(row.site): row for row in rows()} if PAGE.exists() else {}

CHOSEN = {
    1: ["unit/unit.py Unit.reshard: self._streams.join(here, users)"],
    2: [
        "comm/collectives.py Collectives._on: self.streams.follow(stream)",
        "comm/work.py Pending._wait: self.streams.wait(self.event)",
        "unit/unit.py Unit.wait: self._streams.wait(self._filled) (2)",
    ],
}


# In processes of their own, since DTensor keeps meshes that are equal to the next ones, and whose groups are gone by then.
PARALLEL = [name for name, program in PROGRAMS[4].items() if program.parallelized is not None]


def shown(number, parallel=False):
    """The calls without which a race shows on so many ranks, under tensor parallelism or not."""
    places = [p for p, row in LIST.items() if row.ranks == number and (row.program in PARALLEL) is parallel]
    return quick(places, CHOSEN.get(number, []))


def check(row: Row):
    program = PROGRAMS[row.ranks][row.program]
    missing = [row.site] if row.other is None else [row.site, row.other]
    for site in missing if row.other is not None else ():
        assert not run(program, [site], row.pace).races, f"{site} alone is seen"
    outcome = run(program, missing, row.pace)
    assert all(site in outcome.sites for site in missing), "the program does not come there"
    assert outcome.races, "no race shows"


def test_the_list_has_every_call_once():
    listed = Counter(str(row.site) for row in rows() if row.site.call != BLOCKS)
    in_source = {str(site) for site in sites().values()}
    assert sorted(in_source - set(listed)) == [], "to be listed in docs/streams.md"
    assert sorted(set(listed) - in_source) == [], "no longer in the source"
    assert [place for place, times in listed.items() if times > 1] == []
    assert [place for place, row in LIST.items() if not row.kept and row.program not in PROGRAMS[row.ranks]] == []


@pytest.mark.parametrize("place", shown(2))
@ranks(2)
def test_a_race_shows_without_a_call(rank, place):
    check(LIST[place])


@pytest.mark.parametrize("place", shown(1))
@ranks(1)
def test_a_race_shows_without_a_call_in_one_process(rank, place):
    check(LIST[place])


@pytest.mark.parametrize("place", shown(4))
@ranks(4)
def test_a_race_shows_without_a_call_between_replicas(rank, place):
    check(LIST[place])


@pytest.mark.parametrize("place", shown(4, parallel=True))
@ranks(4, fresh=True)
def test_a_race_shows_without_a_call_under_tensor_parallelism(rank, place):
    check(LIST[place])


def check_all_others(program):
    """No other call is reached than the list has, and none shows alone that the list calls kept or ordered twice.

    Most is seen where events pass late, since the host knows least then.
    """
    # Where many are missing at once, races of each would show, and those of a program that lacks nothing.
    outcome = run(program, [row.site for row in LIST.values() if row.kept], "late")
    assert not outcome.races, f"without all that is kept: {outcome.races}"
    assert sorted(str(site) for site in outcome.sites if str(site) not in LIST) == [], "to be listed"
    reached = [LIST[str(site)] for site in outcome.sites]
    for missing in without_pairs([row for row in reached if row.other is not None]):
        if not run(program, missing, "late").races:
            continue
        for site in missing:  # two of them may order the same in this program
            races = run(program, [site], "late").races
            assert not races, f"without {site}: {races}"


def without_pairs(rows):
    """Return the calls of rows in few groups, in none of which are two that are listed as ordering the same."""
    groups = []
    for row in rows:
        place = next((g for g in groups if not any(row.other == o.site or o.other == row.site for o in g)), None)
        if place is None:
            groups.append(place := [])
        place.append(row)
    return [[row.site for row in group] for group in groups]


@pytest.mark.parametrize("name", exhaustive(*dict.fromkeys([*QUICK, *SPECIAL, *OFFLOADED])))
@ranks(2, timeout=600)
def test_nothing_else_is_needed(rank, name):
    check_all_others(PROGRAMS[2][name])


@pytest.mark.parametrize("name", exhaustive(*PROGRAMS[1]))
@ranks(1, timeout=600)
def test_nothing_else_is_needed_in_one_process(rank, name):
    check_all_others(PROGRAMS[1][name])


@pytest.mark.parametrize("name", exhaustive(*(name for name in PROGRAMS[4] if name not in PARALLEL)))
@ranks(4, timeout=600)
def test_nothing_else_is_needed_between_replicas(rank, name):
    check_all_others(PROGRAMS[4][name])


@pytest.mark.parametrize("name", exhaustive(*PARALLEL))
@ranks(4, timeout=600, fresh=True)
def test_nothing_else_is_needed_under_tensor_parallelism(rank, name):
    check_all_others(PROGRAMS[4][name])
