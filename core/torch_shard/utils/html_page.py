"""One HTML file without anything to load, in light and dark, for reports: text, tables and plots."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError


def page(title: str, body: str) -> str:
    """Return a page with a heading. `body` is HTML: classes ``passed``, ``failed`` and ``skipped`` have colours."""
    return _PAGE.format(title=html.escape(title), body=body)


def table(head: Sequence[Any], rows: Iterable[str]) -> str:
    """Return a table that scrolls where the screen is narrow; `rows` are those of :func:`row`."""
    first = f"<thead>{row(head, tag='th')}</thead>" if head else ""
    return f'<div class="wide"><table>{first}<tbody>{"".join(rows)}</tbody></table></div>\n'


def row(cells: Sequence[Any], state: str = "", tag: str = "td") -> str:
    """Return a row of a table, with cells of plain text; `state` is its class."""
    inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f'<tr class="{state}">{inside}</tr>\n'


def check_path(option: str, text: str, beside: Sequence[str] = ()) -> Path:
    """Return the path of a page, after a test that a file can be written there. The test leaves no file.

    Args:
        option: the option by which the user gave the path, for errors.
        text: the path.
        beside: suffixes of files that get the same name and are written beside it.

    Raises:
        ConfigError: the name does not end in ``.html``, the folder is missing, or it can't be written to.
    """
    path = Path(text)
    if path.suffix != ".html":
        more = "".join(f"; the {suffix[1:].upper()} file beside it gets the same name" for suffix in beside)
        raise ConfigError(f"{option} {text}: the name must end in .html{more}.")
    for file in (path, *map(path.with_suffix, beside)):
        there = file.exists()
        try:
            with open(file, "ab"):
                pass
            if not there:
                file.unlink(missing_ok=True)  # other ranks do the same
        except OSError as error:
            raise ConfigError(
                f"{option} {text}: {file.name} can't be written there ({error.strerror}). Give a file in a folder that exists "
                "and that you may write to."
            ) from None
    return path


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
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
svg {{ max-width: 100%; min-width: 34rem; height: auto; color: var(--text); }}
.note {{ opacity: .75; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
