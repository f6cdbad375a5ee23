"""What became of the mutants, and what follows for the sets of tests."""

from __future__ import annotations

import difflib
from collections import defaultdict

import cosmic_ray.plugins
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_item import WorkItem

from tools.mutants import reach, settings, tree
from tools.mutants.judge import Verdict
from tools.mutants.sessions import killers, session, verdict_of


def diff_of(item: WorkItem) -> str:
    """Return a mutation as a unified diff without context."""
    (spec,) = item.mutations
    source = spec.module_path.read_text()
    mutated = mutate_code(source, cosmic_ray.plugins.get_operator(spec.operator_name)(), spec.occurrence)
    return "\n".join(difflib.unified_diff(source.split("\n"), (mutated or source).split("\n"), lineterm="", n=0))


def place(item: WorkItem) -> str:
    (spec,) = item.mutations
    return f"{spec.module_path.relative_to(tree.TREE)}:{spec.start_pos[0]}"


def change(item: WorkItem) -> str:
    """Return a mutation in one line."""
    found = [line for line in diff_of(item).split("\n") if not line.startswith(("---", "+++", "@@"))]
    sides = [" ".join(line[1:].strip() for line in found if line[0] == side) for side in "-+"]
    return " → ".join(f"`{side}`" for side in sides)


def line(item: WorkItem, verdict: Verdict) -> str:
    """Return what became of a mutant, in one line."""
    end = {"failed": f"killed by {verdict.test}", "hung": f"hangs in {verdict.test or 'the beginning'}"}
    end |= {"broken": "killed at import", "error": f"NO VERDICT: {verdict.text[-500:]}"}
    what = end.get(verdict.how, verdict.text or "survived")
    return f"{item.job_id} {place(item)} {change(item)}: {what} ({verdict.ran} tests, {verdict.seconds:.0f} s)"


def text() -> str:
    """Return the report."""
    with session("quick") as db:
        items = {item.job_id: item for item in db.work_items}
        quick = {job: verdict_of(result) for job, result in db.results}
    with session("exhaustive") as db:
        more = {job: verdict_of(result) for job, result in db.results}
    by_quick = [j for j, v in sorted(quick.items()) if v.killed]
    by_more = [j for j, v in sorted(quick.items()) if not v.killed and j in more and more[j].killed]
    survived = [j for j in sorted(quick) if j not in by_quick and j not in by_more]
    unproven = [j for j in survived if j not in more]
    killed = len(by_quick) + len(by_more)
    found = [
        f"# {len(quick)} of {len(items)} mutants (seed {settings.SEED})",
        "",
        f"- killed by the quick tests: {len(by_quick)} ({_percent(len(by_quick), len(quick))})",
        f"- killed by the exhaustive tests only: {len(by_more)}",
        f"- survived: {len(survived)}, {len(unproven)} of which have not met the exhaustive tests yet",
        f"- undecided, for they were not run, or not against all tests yet: {len(items) - len(quick)}",
        f"- of what all tests kill, the quick ones kill {_percent(len(by_quick), killed)}",
    ]
    for title, jobs, verdicts in (
        ("Survived", survived, quick | more),
        ("Killed by the exhaustive tests only", by_more, more),
        ("Killed by the quick tests", by_quick, quick),
    ):
        found += ["", f"## {title}", "", *(f"- {line(items[j], verdicts[j])}" for j in jobs)]
    return "\n".join([*found, "", *_sets([more[j].test for j in by_more])])


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _sets(late: list[str]) -> list[str]:
    """Return which tests could change sets."""
    found = ["## Exhaustive tests that belong in the quick set", ""]
    found += [f"- {name}" for name in sorted(set(late))]
    known = {name: test for name, test in reach.tests().items() if not test.exhaustive}
    used = set(killers())
    needless: dict[str, list[float]] = defaultdict(list)
    kept = reach.cover(known)
    for name, test in known.items():
        if name not in kept and name not in used:
            needless[test.function].append(test.seconds)
    total = sum(sum(seconds) for seconds in needless.values())
    found += [
        "",
        "## Quick tests that reach no line which others do not reach in less time, and killed nothing",
        "",
        f"{sum(map(len, needless.values()))} tests, {total:.0f} s of {sum(t.seconds for t in known.values()):.0f} s (recorded "
        "under coverage). Reaching is not checking: look before one goes. The most expensive ones:",
        "",
    ]
    dear = sorted(needless.items(), key=lambda entry: -sum(entry[1]))
    return found + [f"- {sum(seconds):.1f} s: {function} ({len(seconds)})" for function, seconds in dear[:60]]
