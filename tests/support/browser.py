"""Shows a page in chromium, without a window, and says what came of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

__all__ = ["needs_chromium", "seen"]

needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")

_SCRIPT = """<script>
const light = colour => colour.match(/[\\d.]+/g).slice(0, 3).reduce((sum, part) => sum + part / 765, 0);
parent.document.body.dataset.seen = JSON.stringify({
  inner: innerWidth,
  marks: [...document.querySelectorAll('svg')].map(
    plot => [...plot.querySelectorAll('path')].filter(e => e.getBBox().width > 0).length),
  wide: document.documentElement.scrollWidth > innerWidth,
  back: light(getComputedStyle(document.body).backgroundColor),
  text: light(getComputedStyle(document.body).color),
  labels: [...document.querySelectorAll('svg')].map(plot => light(getComputedStyle(plot.querySelector('text')).fill)),
});
</script></body>"""
_OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
_OPTIONS += [
    "--disable-background-networking",
    "--disable-component-update",
    "--enable-logging=stderr",
    "--dump-dom",
]


def seen(page: Path, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """Return what a browser makes of a page, which must leave nothing on its console.

    Args:
        page: the page.
        folder: an empty one, for the browser.
        width: of the page, in pixels.
        dark: the user likes dark pages.

    Returns:
        Under ``"marks"`` the number of visible shapes of each plot; under ``"wide"`` whether the page is wider than that;
        under ``"back"``, ``"text"`` and ``"labels"`` how light the background is, the text, and the first label of each plot,
        from 0 to 1.
    """
    copy = folder / "page.html"
    # In a frame, because a window of chromium is at least 500 pixels wide.
    framed = html.escape(page.read_text().replace("</body>", _SCRIPT))
    copy.write_text(f'<body><iframe style="border: 0" width="{width}" height="900" srcdoc="{framed}"></iframe></body>')
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    command = ["chromium", *_OPTIONS, scheme, f"--user-data-dir={folder / 'user'}", f"--window-size={width + 100},1000"]
    done = subprocess.run([*command, copy.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search(r'data-seen="(.*?)"', done.stdout)
    assert found is not None
    said: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert said["inner"] == width
    return said
