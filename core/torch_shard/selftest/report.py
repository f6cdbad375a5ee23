"""The report of a self-test: a verdict to read, JSON, and one HTML file without anything to load.

A report is made to be attached to a bug report. It has no names of machines or users, and no paths.
"""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..versions import __version__
from .context import Setting
from .plots import plots_of
from .results import PARTS, Result

__all__ = ["Report", "check_path"]

_WHAT_TO_DO = {
    "correctness": "Don't train with this combination. Please report it, with the report attached.",
    "streams": "Results on this device may be wrong at times. Please report it, with the report attached.",
    "memory": "Plans are wrong by as much. Please report it, with the report attached.",
    "speed": "The engines did different work, so that their times say nothing. See the part correctness first.",
    "offload": "Train without offload. Please report it, with the report attached.",
}


@dataclass(frozen=True)
class Report:
    """What a self-test has found.

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
        """0: what was checked is good; 1: something failed; 2: nothing could be checked."""
        counts = self.counts
        return 1 if counts["failed"] else 0 if counts["passed"] else 2

    @property
    def counts(self) -> dict[str, int]:
        """The number of results by status."""
        return {status: sum(r.status == status for r in self.results) for status in ("passed", "failed", "skipped")}

    @property
    def verdict(self) -> list[str]:
        """Lines for people: counts by part, why checks were skipped, the first failure and what to do about it."""
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
        counted = [(status, sum(r.status == status for r in own)) for status in ("passed", "failed", "skipped")]
        reasons = dict.fromkeys(r.reason for r in own if r.status == "skipped")
        return [
            f"{part:<13}" + ", ".join(f"{count} {status}" for status, count in counted if count),
            *[f"{'':<13}skipped: {reason}" for reason in reasons],
            *[f"{'':<13}{r.name.partition(': ')[2]}: {_times(r)}" for r in own if "step" in r.figures],
        ]

    @property
    def conclusion(self) -> list[str]:
        """Lines behind those of the parts: the first failure, and the counts of all."""
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
        return _plain(found)  # type: ignore[no-any-return]

    def write(self, path: Path) -> None:
        """Write the HTML file, and the JSON file beside it."""
        path.with_suffix(".json").write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="utf-8")
        path.write_text(self.html(), encoding="utf-8")

    def html(self) -> str:
        """Return the report as one HTML page, with plots if matplotlib is installed."""
        plots = plots_of(self.results)
        without = '<p class="note">For plots, <code>pip install matplotlib</code> and run the test again.</p>'
        sections = []
        for part in PARTS:
            own = [r for r in self.results if r.part == part]
            if own:
                plot = "" if plots is None else plots.get(part, "")
                sections.append(f"<h2>{part}</h2>\n{plot}{_table(own)}")
        devices = {"devices": ", ".join(self.environment.get("devices", []))}
        environment = "".join(_row("td", pair) for pair in (self.environment | devices).items() if pair[1] is not None)
        return _PAGE.format(
            state={0: "passed", 1: "failed", 2: "skipped"}[self.exit_code],
            verdict=html.escape("\n".join(self.verdict)),
            note=without if plots is None else "",
            environment=environment,
            sections="\n".join(sections),
        )


def check_path(text: str) -> Path:
    """Return the path of a report, once it is known that a file can be written there; none is left there.

    Raises:
        ConfigError: the name does not end in ``.html``, the folder is missing, or it can't be written to.
    """
    path = Path(text)
    if path.suffix != ".html":
        raise ConfigError(f"--report {text}: the name must end in .html; the JSON file beside it gets the same name.")
    for file in (path, path.with_suffix(".json")):
        there = file.exists()
        try:
            with open(file, "ab"):
                pass
            if not there:
                file.unlink()
        except OSError as error:
            raise ConfigError(
                f"--report {text}: {file.name} can't be written there ({error.strerror}). Give a file in a folder that exists "
                "and that you may write to."
            ) from None
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(own) for own in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _times(result: Result) -> str:
    """Return a result's figures in words, for the verdict."""
    return ", ".join(f"{name} {_number(value, name)}" for name, value in result.figures.items() if name in _SHOWN)


_SHOWN = ("step", "tokens/s", "MFU", "torch_shard's time of it", "of the time without", "waited for the host")
_SECONDS = ("step", "fastest", "slowest", "waited for the host", "waited for gathers", "waited for reductions")


def _number(value: Any, name: str = "") -> str:
    if not isinstance(value, (int, float)):
        return str(value)
    if name in _SECONDS:
        return f"{1000 * value:.1f} ms"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _table(results: Sequence[Result]) -> str:
    head = _row("th", ("", "check", "measured", "expected", "tolerance", "unit", "remark"))
    rows = []
    for r in results:
        limit = "at most" if r.expected is not None and r.tolerance is None else r.tolerance
        numbers = ["" if value is None else _number(value) for value in (r.measured, r.expected, limit)]
        figures = "; ".join(f"{name} {_number(value, name)}" for name, value in r.figures.items())
        remark = " ".join(filter(None, (r.reason, figures)))
        rows.append(_row("td", (r.status, r.name, *numbers, r.unit, remark), r.status))
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(tag: str, cells: Sequence[Any], state: str = "") -> str:
    inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f'<tr class="{state}">{inside}</tr>\n'


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>torch-shard selftest: {state}</title>
<style>
:root {{ color-scheme: light dark; --back: #fff; --text: #1b1f24; --faint: #d5dae0; --good: #1a7f37; --bad: #cf222e; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --back: #14171b; --text: #dde3ea; --faint: #3a424c; --good: #4ac26b; --bad: #ff7b72; }}
}}
body {{ background: var(--back); color: var(--text); font: 15px/1.45 system-ui, sans-serif; margin: 1rem auto; max-width: 70rem;
  padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border-left: 4px solid var(--faint); padding: .5rem 1rem; }}
pre.passed {{ border-color: var(--good); }} pre.failed {{ border-color: var(--bad); }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .85rem; }}
th, td {{ border-bottom: 1px solid var(--faint); padding: .25rem .6rem; text-align: left; vertical-align: top; }}
tr.passed td:first-child {{ color: var(--good); }} tr.failed td:first-child {{ color: var(--bad); font-weight: bold; }}
tr.skipped {{ opacity: .65; }}
svg {{ max-width: 100%; height: auto; color: var(--text); }}
.note {{ opacity: .75; }}
</style></head><body>
<h1>torch-shard selftest</h1>
<pre class="{state}">{verdict}</pre>
{note}
{sections}
<h2>environment</h2>
<div class="wide"><table><tbody>{environment}</tbody></table></div>
</body></html>
"""
