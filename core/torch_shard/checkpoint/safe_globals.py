"""Classes that only hold data and are often kept beside models: hyper-parameters, paths, times, numbers of NumPy.

torch's loader for untrusted files refuses them by default, although making one runs no code from a file.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import pathlib
import sys
import types
from typing import Any


def classes_of_data() -> list[Any]:
    """Return the classes that only hold data, for ``torch.serialization.safe_globals``."""
    found: list[Any] = [
        argparse.Namespace,
        collections.defaultdict,
        collections.deque,
        datetime.date,
        datetime.datetime,
        datetime.timedelta,
        datetime.timezone,
        decimal.Decimal,
        dict,
        int,
        list,
        pathlib.PosixPath,
        pathlib.PurePath,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.WindowsPath,
        set,
        types.SimpleNamespace,
    ]
    numpy = sys.modules.get("numpy")  # torch imports it where it is installed
    if numpy is not None:
        core = sys.modules.get("numpy._core.multiarray") or sys.modules.get("numpy.core.multiarray")
        found += [core.scalar] if core is not None else []
        found += [numpy.dtype, *{type(numpy.dtype(kind)) for kind in "?bhilqBHILQefd"}]
    return found
