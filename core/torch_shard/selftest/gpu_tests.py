"""The repository's own tests for GPUs, where its sources are."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

from ..errors import ConfigError, UnavailableError
from .devices import count


def run_gpu_tests() -> int:
    """Run ``tests/gpu`` of the checkout that the current folder is in.

    Returns:
        0 where all that ran passed, 1 where some failed, and 2 where pytest could not run them.

    Raises:
        ConfigError: the current folder is in no checkout, or there is no GPU, without which all of them are skipped.
        UnavailableError: pytest is not installed.
    """
    here = Path.cwd()
    root = next(
        (p for p in (here, *here.parents) if (p / "tests/gpu").is_dir() and (p / "core/torch_shard").is_dir()), None
    )
    if root is None:
        raise ConfigError(
            "--tests: the current folder is not in a checkout of the repository; go to one, or leave --tests out."
        )
    if not count():
        raise ConfigError("--tests: torch sees no GPU here, so that all tests would be skipped; leave --tests out.")
    if importlib.util.find_spec("pytest") is None:
        raise UnavailableError(
            "--tests: pytest is not installed; `pip install -e '.[test]'` in the checkout brings it."
        )
    code = subprocess.run([sys.executable, "-m", "pytest", "tests/gpu"], cwd=root, check=False).returncode
    return code if code in (0, 1) else 2
