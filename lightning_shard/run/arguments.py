"""The arguments that a strategy of Lightning's was made with, by their documented names.

The constructor notes them, because the objects keep some under other names, and some not at all.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch_shard.errors import ConfigError

_NOTED = "_lightning_shard_arguments"


def note_arguments(kind: Any, instead: Callable[..., None] | None) -> None:
    """Make the constructor of a class note its arguments, from now on.

    Args:
        kind: the class.
        instead: a function that is called with the instance and the arguments by name, in place of the constructor; None for the
            constructor.
    """
    make = kind.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)  # a TypeError, as the constructor's own would be
        if _NOTED not in vars(self):  # the constructor of a base class, which this one calls, gets fewer
            vars(self)[_NOTED] = _by_name(bound)
        if instead is None:
            make(self, *args, **kwargs)
        else:
            instead(self, vars(self)[_NOTED])

    kind.__init__ = noting


def _by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    parameters = bound.signature.parameters
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:  # without self
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            found.update(value)
        else:
            found[name] = value
    return found


def given_to(strategy: Any) -> dict[str, Any]:
    """Return the arguments that a strategy was made with, by name. Defaults are left out.

    Raises:
        ConfigError: no arguments were noted.
    """
    noted = vars(strategy).get(_NOTED)
    if noted is None:
        raise ConfigError(
            f"{type(strategy).__name__}: it was made without its constructor, or before python -m lightning_shard began, so that "
            "its arguments are not known. Make it in the program that is run."
        )
    return dict(noted)
