"""bench/compare.py says what is the case, and docs/compared.md has a row for each of its cases."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.run_python import run_python

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def compare(tmp_path: Path, *arguments: object, expected: int) -> tuple[str, dict[str, dict[str, dict[str, str]]]]:
    """Run the program; return what it prints, and its verdicts by case and engine."""
    file = tmp_path / "result.json"
    done = run_python(BENCH / "compare.py", *arguments, "--json", file, path=[BENCH], expected=expected)
    return done.stdout, json.loads(file.read_text())["cases"]


@pytest.mark.exhaustive
def test_each_letter_is_given_where_it_is_due(tmp_path):
    cases = ROOT / "tests" / "support" / "compared.py"
    printed, found = compare(tmp_path, "--cases", cases, "--engines", "ddp,ours", expected=1)
    for engine in ("ddp", "ours"):
        letters = {name: verdicts[engine]["letter"] for name, verdicts in found.items()}
        assert letters == {"right": "P", "wrong": "W", "seen": "W", "error": "E", "hang": "H"}
        whys = {name: verdicts[engine]["why"] for name, verdicts in found.items()}
        assert re.match(r"rank 0: parameters, 0, inp\.weight differs by ", whys["wrong"])
        assert whys["seen"] == "rank 1: rank is 1, not 0"
        assert whys["error"].startswith("rank 1: ValueError: no such file\nTraceback")
        assert "in hang" in whys["hang"], "the stack of the rank that did not come"
    assert "\n| right | P | P |\n| wrong: one rank's loss counts twice | **W** | **W** |\n" in printed


@pytest.mark.exhaustive
def test_its_own_cases_tell_engines_apart(tmp_path):
    _, found = compare(tmp_path, "--only", "^(a_method|replaced_layer)$", "--engines", "ddp,ours", expected=0)
    assert {name: [v["letter"] for v in verdicts.values()] for name, verdicts in found.items()} == {
        "a_method": ["W", "P"],
        "replaced_layer": ["E", "E"],
    }


def test_the_page_has_a_row_for_each_case_with_its_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from compare.case import CASES, load_cases

    load_cases(None)
    page = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\S.*?) \|.*\| `(\S+)` \|$", page, flags=re.M)
    assert rows == [(c.text, c.test) for refused in (False, True) for c in CASES if c.refused is refused], "--write"
