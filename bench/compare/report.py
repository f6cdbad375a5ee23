"""The table of verdicts in Markdown, and its place in the documentation."""

from __future__ import annotations

import os
import platform
import re
import textwrap
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TypeAlias

from .case import Case
from .engines import ENGINES
from .verdict import Verdict

__all__ = ["Row", "notes", "reasons", "table", "versions", "write"]

Row: TypeAlias = tuple[Case, dict[str, Verdict]]


def versions(engines: Sequence[str], missing: Sequence[str], ranks: int) -> str:
    """Return a paragraph on what was run, where and when, and what was not."""
    packages = list(dict.fromkeys(ENGINES[name].version() for name in ("plain", *engines)))
    where = f"{ranks} Gloo ranks, {os.cpu_count()} CPU cores"
    text = f"{where}; {', '.join(packages)}, Python {platform.python_version()}; {date.today()}."
    for name in missing:
        text += f" No column for {ENGINES[name].label}: {ENGINES[name].missing()} is not installed."
    return text


def table(rows: Sequence[Row], engines: Sequence[str], tests: bool = False) -> str:
    """Return a table with a row for each case, and with the test behind it if `tests`."""
    head = ["", *(ENGINES[name].label for name in engines), *(["test"] if tests else [])]
    lines = [head, ["---"] * len(head)]
    for case, verdicts in rows:
        letters = [f"**{v.letter}**" if v.letter in "WH" else v.letter for v in (verdicts[name] for name in engines)]
        lines.append([case.text, *letters, *([f"`{case.test}`"] if tests else [])])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")


def notes(rows: Sequence[Row]) -> str:
    """Return the notes on the cases, as a list."""
    return "\n".join(_filled(f"- {case.text}: {case.note}") for case, _ in rows if case.note)


def reasons(rows: Sequence[Row], engines: Sequence[str]) -> str:
    """Return why a cell is not P, a line each."""
    return "\n".join(
        f"- {case.name}, {ENGINES[name].label}: {verdicts[name].letter}: {verdicts[name].why.splitlines()[0]}"
        for case, verdicts in rows
        for name in engines
        if verdicts[name].letter != "P"
    )


def write(file: Path, marker: str, text: str) -> None:
    """Put a text between ``<!-- marker -->`` and ``<!-- /marker -->`` in a file."""
    pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- /{marker} -->)", flags=re.S)
    before = file.read_text(encoding="utf-8")
    after, count = pattern.subn(lambda found: f"{found[1]}{text}\n{found[2]}", before)
    if count != 1:
        raise ValueError(f"{file} has {count} places marked {marker}")
    file.write_text(after, encoding="utf-8")


def _filled(line: str) -> str:
    return textwrap.fill(line, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
