"""Imports between the rooms of accelerate_shard point one way."""

from __future__ import annotations

from pathlib import Path

from tests.repo.test_arrows import ROOT, files_of, imports_of

PACKAGE = ROOT / "accelerate_shard"
ORDER = ("_private", "settings", "coordination", "models", "state", "accelerator", "trainer", "launch", "cli")
TOP = ("__init__", "__main__")  # may import every room


def room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def upward(file: Path, source: str | None = None) -> list[str]:
    """Return the imports of a file that do not point to its own room or one below."""
    found = []
    for each in imports_of(file, source):
        parts = each.target.split(".")
        if parts[0] == "accelerate_shard" and (len(parts) == 1 or ORDER.index(parts[1]) > ORDER.index(room_of(file))):
            found.append(str(each))
    return found


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(file) for file in files_of(PACKAGE)} == {*ORDER, *TOP}


def test_no_import_points_up() -> None:
    files = [file for file in files_of(PACKAGE) if room_of(file) not in TOP]
    assert [line for file in files for line in upward(file)] == []


def test_an_import_that_points_up_is_seen() -> None:
    assert upward(PACKAGE / "settings" / "resolve.py", "from ..launch.enable import enable")
    assert upward(PACKAGE / "models" / "checks.py", "def f():\n    from .. import accelerator")
    assert not upward(PACKAGE / "launch" / "enable.py", "from ..settings.resolve import set_enabled_plugin")
