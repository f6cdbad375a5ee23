"""Runs a program in a Python process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path


def variables(path: Iterable[Path] = (), **environment: str) -> dict[str, str]:
    """Return the variables of an interpreter that finds what this process finds, see :func:`run_python`."""
    # What this process finds (a checkout that is not installed, say), the other must find from any folder.
    search = os.pathsep.join([*map(str, path), *(p for p in sys.path if p)])
    # Unbuffered, each word of a print() is written by itself, and lines of several ranks get mixed up in one pipe.
    return os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "", **environment}


def run_python(
    *arguments: object,
    folder: Path | None = None,
    path: Iterable[Path] = (),
    expected: int | None = 0,
    timeout: float = 150.0,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter, and fail with all that was printed unless it exits with `expected`.

    Args:
        arguments: of the command line: ``"-c", code``, ``"-m", module`` or a script.
        folder: the working directory. It needs to be another one than the checkout where `path` is to hide packages of
            that: with ``-c`` and ``-m`` Python looks there first.
        path: folders with packages that hide those of the same name.
        expected: exit status; None for any.
        timeout: in seconds.
        environment: further variables.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=variables(path, **environment),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert expected in (None, done.returncode), done.stdout + done.stderr
    return done
