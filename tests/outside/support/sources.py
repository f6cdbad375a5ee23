"""Where programs come from. None of them is in this repository."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Protocol

__all__ = ["Copied", "Fetched", "NotThere", "Outside", "Own", "Packaged", "Source"]

ROOT = Path(__file__).resolve().parents[3]


class NotThere(Exception):
    """A program's source is not on this machine; the text says what is missing."""


class Source(Protocol):
    """Where one program is."""

    def command(self) -> list[str]:
        """Return what starts it behind ``python``: its path, or ``-m`` and a name.

        Raises:
            NotThere: it is not on this machine.
        """


@dataclass(frozen=True)
class Outside:
    """A file below the folder that ``OUTSIDE`` names, ``../shared/outside`` beside this repository by default.

    Attributes:
        path: its path there.
        digest: how its SHA-256 begins, as that folder's README.md says.
    """

    path: str
    digest: str

    def command(self) -> list[str]:
        folder = Path(os.environ.get("OUTSIDE", ROOT.parent / "shared" / "outside"))
        return [_file(folder / self.path, self.digest, "OUTSIDE")]


@dataclass(frozen=True)
class Fetched:
    """A file of a public repository that lies at ``OUTSIDE_SOURCES/<owner>/<name>``; there is no default.

    Attributes:
        repository: ``owner/name`` on GitHub.
        commit: the commit that it was read from.
        path: its path there.
        digest: how its SHA-256 begins.
        needs: packages that no other program needs, by the names by which they are imported.
    """

    repository: str
    commit: str
    path: str
    digest: str
    needs: Sequence[str] = ()

    def command(self) -> list[str]:
        folder = os.environ.get("OUTSIDE_SOURCES")
        if folder is None:
            raise NotThere(f"OUTSIDE_SOURCES is not set, and {self.repository} at {self.commit} not there")
        path = _file(Path(folder) / self.repository / self.path, self.digest, "OUTSIDE_SOURCES")
        missing = [name for name in self.needs if not _is_installed(name)]
        if missing:
            raise NotThere(f"not installed: {', '.join(missing)} (OUTSIDE_PACKAGES names a folder of further packages)")
        return [path]


@dataclass(frozen=True)
class Copied:
    """A program that writes beside itself, and so is run from a copy, which ``prepare`` puts into the working directory.

    Attributes:
        source: what is copied.
        path: the copy's path in the working directory.
    """

    source: Fetched
    path: str

    def command(self) -> list[str]:
        self.source.command()
        return [self.path]


@dataclass(frozen=True)
class Packaged:
    """A program that an installed package brings.

    Attributes:
        package: the name by which it is imported.
        path: a file's path in it; None to run `module`.
        module: the name behind ``-m``.
    """

    package: str
    path: str | None = None
    module: str | None = None

    def command(self) -> list[str]:
        found = importlib.util.find_spec(self.package)
        if found is None or not found.submodule_search_locations:
            raise NotThere(f"{self.package} is not installed")
        if self.path is None:
            return ["-m", self.module or self.package]
        path = Path(found.submodule_search_locations[0]) / self.path
        if not path.is_file():
            raise NotThere(f"this version of {self.package} has no {self.path}")
        return [str(path)]


@dataclass(frozen=True)
class Own:
    """A script of ours that uses another project's library as its users do; counted apart from outside programs.

    Attributes:
        path: its path below ``tests/outside``.
        package: the library that it needs.
    """

    path: str
    package: str

    def command(self) -> list[str]:
        if importlib.util.find_spec(self.package) is None:
            raise NotThere(f"{self.package} is not installed")
        return [str(ROOT / "tests" / "outside" / self.path)]


def _is_installed(package: str) -> bool:
    further = os.environ.get("OUTSIDE_PACKAGES")
    return bool(importlib.util.find_spec(package) or (further and PathFinder.find_spec(package, [further])))


def _file(path: Path, digest: str, variable: str) -> str:
    if not path.is_file():
        raise NotThere(f"there is no {path} ({variable} names its folder)")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if not digest or not found.startswith(digest):
        raise AssertionError(f"{path} is another version or was edited: SHA-256 {found[:16]}, not {digest}")
    return str(path)
