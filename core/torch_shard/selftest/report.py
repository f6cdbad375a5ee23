"""The report of a self-test: a verdict to read, JSON, and one HTML file without anything to load.

A report is made to be attached to a bug report. It has no names of machines or users, and no paths.
"""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..utils.html_page import page, row, table
from ..utils.svg import WITHOUT_PLOTS
from ..versions import __version__
from .context import Setting
from .plots import plots_of
from .results import PARTS, Result

# The figures that the verdict shows, and those that are times.
_SHOWN = (
    "step",
    "tokens/s",
    "MFU",
    "torch_shard's time relative to it",
    "time relative to no offload",
    "waited for the host",
)
_SECONDS = ("step", "fastest", "slowest", "waited for the host", "waited for gathers", "waited for reductions")
_WHAT_TO_DO = {
    "correctness": "Don't train with this combination. Please report it, with the report attached.",
    "streams": "Results on this device may be wrong at times. Please report it, with the report attached.",
    "memory": "Plans are wrong by as much. Please report it, with the report attached.",
    "speed": "The engines did different work, so that their times say nothing. See the part correctness first.",
    "offload": "Train without offload. Please report it, with the report attached.",
}


@dataclass(frozen=True)
class Report:
    """The findings of a self-test.

    Attributes:
        setting: the devices, ranks and sizes.
        environment: versions and devices.
        results: all results, in order.
        seconds: the time that it took.
    """

    setting: Setting
    environment: dict[str, Any]
    results: Sequence[Result]
    seconds: float

    @property
    def exit_code(self) -> int:
        """The exit code: 0 if what was checked is good, 1 if something failed, 2 if nothing could be checked."""
        counts = self.counts
        return 1 if counts["failed"] else 0 if counts["passed"] else 2

    @property
    def counts(self) -> dict[str, int]:
        """The number of results by status."""
        return _counts(self.results)

    @property
    def verdict(self) -> list[str]:
        """The lines for people: counts by part, why checks were skipped, the first failure and what to do about it."""
        parts = [line for part in PARTS for line in self.part(part)]
        return [self.title, "", *parts, *self.conclusion]

    @property
    def title(self) -> str:
        """The versions and devices, in one line."""
        e, ranks = self.environment, self.setting.ranks
        where = ", ".join(dict.fromkeys(e.get("devices", [self.setting.kind])))
        # The ranks have reported nothing where all was skipped.
        versions = f"torch-shard-engine {e.get('torch_shard', __version__)}, torch {e.get('torch', torch.__version__)}"
        libraries = "".join(f", {name.upper()} {e[name]}" for name in ("cuda", "hip", "nccl") if e.get(name))
        which = ", which they share" if self.setting.shares else ""
        return f"{versions}{libraries}; {ranks} rank{'s' * (ranks > 1)} on {self.setting.kind} ({where}{which})"

    def part(self, part: str) -> list[str]:
        """Return the lines of one part; none if nothing of it was run."""
        own = [r for r in self.results if r.part == part]
        if not own:
            return []
        reasons = dict.fromkeys(r.reason for r in own if r.status == "skipped")
        return [
            f"{part:<13}" + ", ".join(f"{count} {status}" for status, count in _counts(own).items() if count),
            *[f"{'':<13}skipped: {reason}" for reason in reasons],
            *[f"{'':<13}{r.name.partition(': ')[2]}: {_times(r)}" for r in own if "step" in r.figures],
        ]

    @property
    def conclusion(self) -> list[str]:
        """The lines after those of the parts: the first failure, and the counts of all."""
        lines = []
        failed = [r for r in self.results if r.status == "failed"]
        if failed:
            lines += ["", f"first failure  {failed[0].part}: {failed[0].name}", f"  {failed[0].reason}"]
            lines.append(f"  {_WHAT_TO_DO[failed[0].part]}")
        word = {0: "PASSED", 1: "FAILED", 2: "NOTHING WAS CHECKED"}[self.exit_code]
        numbers = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        return [*lines, "", f"{word}: {numbers}, in {self.seconds:.0f} s"]

    def plain(self) -> dict[str, Any]:
        """Return the report as values that JSON has; infinite and undefined numbers are texts."""
        found = {
            "format": 1,
            "good": self.exit_code == 0,
            "counts": self.counts,
            "seconds": round(self.seconds, 1),
            "setting": dataclasses.asdict(self.setting),
            "environment": self.environment,
            "results": [dataclasses.asdict(result) for result in self.results],
        }
        return json.loads(json.dumps(found), parse_constant=lambda name: str(float(name)))  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        """Write the HTML file, and the JSON file beside it."""
        path.with_suffix(".json").write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="utf-8")
        path.write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """Return the report as one HTML page, with plots if matplotlib is installed."""
        plots = plots_of(self.results)
        sections = []
        for part in PARTS:
            own = [r for r in self.results if r.part == part]
            if own:
                plot = "" if plots is None else plots.get(part, "")
                sections.append(f"<h2>{part}</h2>\n{plot}{_table(own)}")
        devices = {"devices": ", ".join(self.environment.get("devices", []))}
        environment = table((), (row(pair) for pair in (self.environment | devices).items() if pair[1] is not None))
        state = {0: "passed", 1: "failed", 2: "skipped"}[self.exit_code]
        verdict = html.escape("\n".join(self.verdict))
        body = [f'<pre class="{state}">{verdict}</pre>', WITHOUT_PLOTS if plots is None else "", *sections]
        return page("torch-shard selftest", "\n".join([*body, "<h2>environment</h2>", environment]))


def _counts(results: Sequence[Result]) -> dict[str, int]:
    return {status: sum(r.status == status for r in results) for status in ("passed", "failed", "skipped")}


def _times(result: Result) -> str:
    """Return a result's figures in words, for the verdict."""
    return ", ".join(f"{name} {_number(value, name)}" for name, value in result.figures.items() if name in _SHOWN)


def _number(value: Any, name: str = "") -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    if name in _SECONDS:
        return f"{1000 * value:.1f} ms"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(results: Sequence[Result]) -> str:
    rows = []
    for r in results:
        limit = "at most" if r.expected is not None and r.tolerance is None else r.tolerance
        numbers = ["" if value is None else _number(value) for value in (r.measured, r.expected, limit)]
        figures = "; ".join(f"{name} {_number(value, name)}" for name, value in r.figures.items())
        remark = " ".join(filter(None, (r.reason, figures)))
        rows.append(row((r.status, r.name, *numbers, r.unit, remark), r.status))
    return table(("", "check", "measured", "expected", "tolerance", "unit", "remark"), rows)
