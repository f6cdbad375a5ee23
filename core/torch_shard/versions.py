"""Version floors and tested versions, and every version gate, in one place.

The requirements in ``pyproject.toml`` repeat the floors; a test keeps the two equal.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

import torch
from packaging.version import InvalidVersion, Version

from .errors import UnavailableError

__all__ = [
    "FLOORS",
    "MIN_PYTHON",
    "MIN_TORCH",
    "TESTED",
    "TORCH_VERSION",
    "__version__",
    "at_least",
    "check_torch",
    "counts_references",
    "installed",
]

__version__ = "0.1.0"
"""Version of this distribution; the build reads it here."""

MIN_PYTHON = "3.10"
MIN_TORCH = "2.11"

FLOORS: Mapping[str, str] = MappingProxyType(
    {
        "torch": MIN_TORCH,
        "packaging": "23.0",
        "tqdm": "4.60",
        "safetensors": "0.4.3",
        "lightning": "2.6",
        "pytorch-lightning": "2.6",
        "transformers": "5.0",
        "accelerate": "1.15",
        "peft": "0.17",
        "pyyaml": "6.0",
        "rich": "13",
    }
)
"""Oldest version of each distribution that is supported."""

TESTED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "torch": ("2.11.0", "2.13.0", "2.14.1"),
        "packaging": ("26.3",),
        "tqdm": ("4.70.1",),
        "safetensors": ("0.8.0",),
        "lightning": ("2.6.6",),
        "pytorch-lightning": ("2.6.6",),
        "transformers": ("5.23.0",),
        "accelerate": ("1.15.0",),
        "peft": ("0.21.2",),
        "pyyaml": ("6.0.3",),
    }
)
"""Versions that the tests were run with. Nothing in this release uses the other distributions of :data:`FLOORS`."""


def _released(text: str) -> Version:
    # Nightly builds (2.15.0.dev..., 2.15.0a0+git...) already have what 2.15 has, but sort before it.
    try:
        return Version(Version(text).base_version)
    except InvalidVersion:
        # A build from source may carry any text; such a build is taken to be the newest.
        return Version("9999")


TORCH_VERSION: Version = _released(torch.__version__)
"""The running torch, without local, pre-release and development parts."""


def at_least(version: str) -> bool:
    """Return whether the running torch is `version` or newer, nightly builds of it included."""
    return Version(version) <= TORCH_VERSION


def installed(distribution: str) -> Version | None:
    """Return the installed version of a distribution (as :data:`TORCH_VERSION` is cut), or None."""
    try:
        return _released(metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return None


def check_torch() -> None:
    """Raise :class:`~torch_shard.errors.UnavailableError` where torch is older than the floor."""
    if not at_least(MIN_TORCH):
        raise UnavailableError(
            f"torch {torch.__version__} is too old: sharding needs torch >= {MIN_TORCH}. "
            f"Upgrade it, for example with `pip install 'torch>={MIN_TORCH}'`."
        )


def counts_references() -> bool:
    """Return True if the number of references to an object says, at any moment and alike on all ranks, who holds it.

    Not on builds of Python without the GIL, whether it runs or not: what another thread lets go of may live on for a while. A
    count is then too high, and so is one that was taken to compare with later.
    """
    return not sysconfig.get_config_var("Py_GIL_DISABLED")
