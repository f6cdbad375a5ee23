"""Which tests reach which lines, and in which order a mutant meets them."""

from __future__ import annotations

import heapq
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path

import coverage

from tools.mutants import settings, tree
from tools.mutants.record import read


@dataclass(frozen=True)
class Test:
    """A test as it was recorded."""

    name: str
    seconds: float
    exhaustive: bool
    fixtures: tuple[str, ...]

    @property
    def function(self) -> str:
        return self.name.partition("[")[0]


def record(exhaustive: bool, arguments: list[str], lanes: int) -> None:
    """Run the quick tests, or all, under coverage, except those that are recorded already."""
    environment = tree.environment(
        path=tree.TREE / "tools" / "mutants" / "subprocesses", MUTANTS_RECORD=tree.RECORD, MUTANTS_TREE=tree.TREE
    )
    marks = ["-m", "not outside"] if exhaustive else []
    workers = ["-n", lanes, "--dist", "loadfile"] if lanes > 1 else []
    # Tests may fail: those are left out later on.
    command = tree.pytest("-p", "tools.mutants.record", "--tb=line", *marks, *workers, *arguments)
    status = subprocess.run(command, cwd=tree.TREE, env=environment).returncode
    if status not in (0, 1, 5):
        raise SystemExit(f"the tests could not be recorded: pytest ended with status {status}")
    combine()


def combine() -> None:
    """Put what the processes have written into one file."""
    parts = [str(part) for part in (tree.RECORD / "parts").glob("coverage.*")]
    if parts:
        whole = coverage.Coverage(data_file=str(tree.RECORD / "coverage"), config_file=False, messages=False)
        whole.load()
        whole.combine(parts)
        whole.save()


def tests() -> dict[str, Test]:
    """Return the recorded tests that passed, by name; unless their file has changed."""
    found = {}
    for line in read(tree.RECORD / "tests.jsonl"):
        if line["outcome"] == "passed" and line["version"] == tree.version(line["test"]):
            found[line["test"]] = Test(line["test"], line["seconds"], line["exhaustive"], tuple(line["fixtures"]))
    return found


@cache
def _data() -> coverage.CoverageData:
    data = coverage.CoverageData(str(tree.RECORD / "coverage"))
    data.read()
    return data


@cache
def _contexts(file: Path) -> dict[int, frozenset[str]]:
    return {line: frozenset(found) for line, found in _data().contexts_by_lineno(str(file)).items()}


@cache
def breadth() -> dict[str, int]:
    """Return how many lines of the mutated files each context reaches."""
    found: dict[str, int] = defaultdict(int)
    for part in settings.PARTS:
        for file in tree.files(part):
            for contexts in _contexts(file).values():
                for context in contexts:
                    found[context] += 1
    return found


def reaching(
    file: Path, lines: set[int], around: set[int], known: dict[str, Test], killers: dict[str, int]
) -> list[Test]:
    """Return the tests of `known` that reach one of `lines`, in the order in which to run them.

    Those of `killers` come first, which have killed that many mutants. Then, in turns, those that compare training with the
    plain one, and those that reach what few others reach of the file, and above all of the lines `around`: they are about
    what it does. Among equals, quick ones come first. Each test function comes once before any comes again, with other
    parameters.
    """
    contexts = frozenset().union(*(found for line, found in _contexts(file).items() if line in lines))
    chosen = [t for t in known.values() if t.name in contexts or not contexts.isdisjoint(t.fixtures)]
    rare: dict[str, float] = defaultdict(float)
    for line, found in _contexts(file).items():
        for context in found:
            rare[context] += (10 if line in around else 1) / len(found)
    cost = {t.name: (t.seconds + 0.1) * (breadth()[t.name] + 50) for t in chosen}
    comparing = sorted(chosen, key=lambda t: (not re.search(settings.COMPARES, t.name), cost[t.name], t.name))
    closest = sorted(chosen, key=lambda t: (-rare[t.name] / (t.seconds + 0.5), t.name))
    mixed = dict.fromkeys(test for pair in zip(comparing, closest, strict=True) for test in pair)
    turns: dict[str, list[Test]] = defaultdict(list)
    for test in mixed:
        turns[test.function].append(test)
    order = [test for turn in zip_longest(*turns.values()) for test in turn if test is not None]
    return sorted(order, key=lambda test: -killers.get(test.name, 0))  # stable


def cover(known: dict[str, Test]) -> set[str]:
    """Return tests that reach together all that `known` reach, chosen by lines for the time."""
    reached: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for file in _data().measured_files():
        for line, contexts in _contexts(Path(file)).items():
            for context in contexts:
                reached[context].add((file, line))
    left = {t.name: reached[t.name].union(*(reached[f] for f in t.fixtures)) for t in known.values()}
    chosen: set[str] = set()
    # Lazily greedy: what a test adds only shrinks, so the best of old figures that stays the best is the best.
    heap = [(-len(new) / (known[name].seconds + 0.02), name) for name, new in left.items() if new]
    heapq.heapify(heap)
    done: set[tuple[str, int]] = set()
    while heap:
        _, name = heapq.heappop(heap)
        new = left[name] - done
        value = -len(new) / (known[name].seconds + 0.02)
        if new and heap and value > heap[0][0]:
            heapq.heappush(heap, (value, name))
        elif new:
            chosen.add(name)
            done |= new
    return chosen
