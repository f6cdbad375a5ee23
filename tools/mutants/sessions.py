"""Cosmic Ray's session files, and the verdicts in them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkResult

from tools.mutants import tree
from tools.mutants.judge import Verdict


def session(name: str) -> AbstractContextManager[WorkDB]:
    """Open the session of the quick tests, or of the exhaustive ones, for which those are items that survived the former."""
    return use_db(str(tree.BUILD / f"{name}.sqlite"))


def verdict_of(result: WorkResult) -> Verdict:
    """Return the verdict that a result holds in its output."""
    try:
        return Verdict(**json.loads((result.output or "").strip().splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return Verdict("error", text=result.output or "")


def unreliable() -> set[str]:
    """Return the tests that killed a mutant, but fail without one, too."""
    file = tree.BUILD / "unreliable.json"
    return set(json.loads(file.read_text())) if file.exists() else set()


def killers() -> dict[str, int]:
    """Return the tests that killed mutants, and how many each."""
    found: dict[str, int] = {}
    for name in ("quick", "exhaustive"):
        with session(name) as db:
            for _, result in db.results:
                verdict = verdict_of(result)
                if verdict.killed and verdict.test:
                    found[verdict.test] = found.get(verdict.test, 0) + 1
    return found
