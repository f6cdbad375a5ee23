"""This distribution's version, the oldest torch that is supported, what was tested, and every gate on torch's version.

The floors of all dependencies are in ``pyproject.toml``.
"""

from __future__ import annotations

import re
import sysconfig

import torch

from .errors import UnavailableError

__all__ = [
    "MIN_TORCH",
    "TESTED",
    "TORCH_VERSION",
    "__version__",
    "at_least",
    "check_torch",
    "counts_references",
]

__version__ = "0.1.0"
"""Version of this distribution; the build reads it here."""

MIN_TORCH = "2.11"
"""The oldest torch that is supported, as in ``pyproject.toml``."""

TESTED = {
    "torch": ("2.11.0", "2.13.0", "2.14.1"),
    "tqdm": ("4.70.1",),
    "safetensors": ("0.8.0",),
    "lightning": ("2.6.6",),
    "pytorch-lightning": ("2.6.6",),
    "transformers": ("5.23.0", "5.24.0"),
    "accelerate": ("1.15.0",),
    "peft": ("0.21.2",),
    "pyyaml": ("6.0.3", "6.0.4"),
}
"""Versions that the tests were run with."""


def _numbers(version: str) -> tuple[int, ...]:
    # The numbers alone count: a nightly build (2.15.0.dev..., 2.15.0a0+git...) already has what 2.15 has.
    found = re.match(r"\d+(\.\d+)*", version)
    # A build from source may carry any text; such a build is taken to be the newest.
    return tuple(map(int, found[0].split("."))) if found else (9999,)


TORCH_VERSION = _numbers(torch.__version__)
"""The version of the running torch as numbers, without its local, pre-release and development parts."""


def at_least(version: str) -> bool:
    """Return True if the running torch is `version` or newer, nightly builds of it included."""
    return _numbers(version) <= TORCH_VERSION


def check_torch() -> None:
    """Raise :class:`~torch_shard.errors.UnavailableError` where torch is older than the floor."""
    if not at_least(MIN_TORCH):
        raise UnavailableError(
            f"torch {torch.__version__} is too old: sharding needs torch >= {MIN_TORCH}. "
            f"Upgrade it, for example with `pip install 'torch>={MIN_TORCH}'`."
        )


def counts_references() -> bool:
    """Return True if the number of references to an object tells, at any moment and alike on all ranks, who holds it.

    It does not on free-threaded builds of Python, even with the GIL enabled: an object that another thread drops may live on for
    a while, so counts can be too high.
    """
    return not sysconfig.get_config_var("Py_GIL_DISABLED")
