"""The common parts of the runners: settings given as text, and running a script as Python would have run it.

A runner is ``python -m torch_shard``, ``python -m lightning_shard`` or ``python -m accelerate_shard`` before the name of a
script that knows nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from types import FrameType, ModuleType, TracebackType
from typing import Any

from ..config.offload_text import text_of as text_of_offload
from ..config.settings_from_text import (
    FLAG_FORM,
    PREFIX,
    SETTINGS,
    Setting,
    closest,
    flag,
    names,
    one_of,
    read_value,
    read_variables,
)
from ..errors import ConfigError, ShardError

__all__ = [
    "FLAG_FORM",
    "FRONT_END_SETTINGS",
    "MISUSED",
    "PREFIX",
    "SETTINGS",
    "Replaced",
    "Setting",
    "closest",
    "flag",
    "names",
    "one_of",
    "read_arguments",
    "read_value",
    "read_variables",
    "replace_everywhere",
    "run_script",
    "text_of_offload",
    "values_of",
]

MISUSED = 2
"""The exit code for wrong arguments."""

_ARGUMENT = "--shard."


def _layers(text: str) -> bool | tuple[str, ...]:
    try:
        return flag(text)
    except ValueError:
        return names(text)


_LAYERS = f"{FLAG_FORM}, or names of classes, separated by commas"
FRONT_END_SETTINGS = (
    Setting("activation_checkpointing", _layers, _LAYERS),
    Setting("activation_offload", _layers, _LAYERS),
    Setting("async_save", flag, FLAG_FORM),
    Setting("weights_only", flag, FLAG_FORM),
    Setting("defer_gradient_sync", flag, FLAG_FORM),
)
"""The settings that the front ends have in common beside :data:`SETTINGS`."""


def read_arguments(
    arguments: Sequence[str], settings: Iterable[Setting], environment: MutableMapping[str, str]
) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Return the values of ``--shard.field=text`` arguments by field, each with its argument, and the arguments after them.

    The settings stand before the script's name; those behind it are the script's own. ``--shard.field text`` and, for a
    setting that is true or false, ``--shard.field`` alone mean the same. Not collective.

    Args:
        arguments: the arguments of the command line.
        settings: the settings that are known.
        environment: gets the arguments as variables, for the processes that this one starts, as ``strategy="auto"`` does.

    Raises:
        ConfigError: a setting is unknown, or its value is wrong or missing.
    """
    known = {setting.field: setting for setting in settings}
    found: dict[str, tuple[str, Any]] = {}
    rest = list(arguments)
    while rest and rest[0].startswith(_ARGUMENT):
        argument, has_text, text = rest.pop(0).partition("=")
        setting = known.get(argument.removeprefix(_ARGUMENT).replace("-", "_"))
        if setting is None:
            close = closest(argument, [_ARGUMENT + field for field in known])
            raise ConfigError(
                f"{argument} is no setting of this package." + (f" Did you mean {close}?" if close else "")
            )
        if not has_text:
            if setting.form == FLAG_FORM:
                text = "true"
            elif rest:
                text = rest.pop(0)
            else:
                raise ConfigError(f"{argument} must be {setting.form}; nothing was given.")
        found[setting.field] = (argument, read_value(setting, argument, text))
        environment[setting.variable] = text
    return found, rest


def run_script(
    runner: str,
    name: str,
    arguments: Sequence[str],
    is_module: bool,
    prepare: Callable[[], None],
    report: str | None = None,
) -> None:
    """Run a script, or a module, as the main program of this process. Not collective.

    Args:
        runner: the name of the runner's package, for messages.
        name: the path of the script, or the name of the module.
        arguments: the script's own arguments.
        is_module: True if `name` is a module's.
        prepare: a function that is called first. A ``ShardError`` that it raises is written without a traceback.
        report: the file of a page about the training, see :func:`.reports.reporting`; None for no page.

    Raises:
        SystemExit: with code :data:`MISUSED`: `prepare` has failed, the report can't be written or there is no such script. The
            message is on standard error.
        Exception: what the script raises. The runner's frames are left out of a traceback that ends the process.
    """
    around: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        prepare()
        if report is not None:
            from .reports import reporting

            around = reporting(report)
    except ShardError as error:
        if os.environ.get("RANK", "0") == "0":  # the error is the same on all ranks
            print(f"{runner}: {error}", file=sys.stderr)
        raise SystemExit(MISUSED) from None
    if not is_module and not os.path.exists(name):
        print(f"{runner}: there is no script {name!r}.", file=sys.stderr)
        raise SystemExit(MISUSED)
    sys.excepthook = _without_frames_of({runner, "torch_shard", "runpy"}, sys.excepthook)
    sys.argv = [name, *arguments]
    with around:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            # Python puts a script's folder here; for this process, which was started with -m, it has put the working directory.
            sys.path[0] = os.path.dirname(os.path.realpath(name))
            runpy.run_path(name, run_name="__main__")


def _without_frames_of(packages: set[str], report: Callable[..., Any]) -> Callable[..., Any]:
    """Return `report`, an excepthook, without the frames of these packages that are before the script's own."""

    def is_before(frame: FrameType) -> bool:
        name = frame.f_globals.get("__package__") or frame.f_globals.get("__name__") or ""
        return name.partition(".")[0] in packages

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        first = traceback
        while first is not None and is_before(first.tb_frame):
            first = first.tb_next
        shown = traceback if first is None else first
        # Python's own hook uses the exception's traceback, others use the argument.
        report(kind, error.with_traceback(shown), shown)

    return excepthook


Replaced = list[tuple[ModuleType, str, Any]]
"""The places in which an object was replaced: each with the module, the name in it, and the former object."""


def replace_everywhere(stock: Any, ours: Any, own_packages: Iterable[str]) -> Replaced:
    """Replace an object by another one under all its names in the modules that are loaded. Not collective.

    Args:
        stock: the object to replace.
        ours: the object to put in its place.
        own_packages: the packages that go on using `stock`.

    Returns:
        The places, by which the replacement can be undone.
    """
    found: Replaced = []
    own = set(own_packages)
    for module in list(sys.modules.values()):
        # __dict__, because lazy modules would import everything on getattr.
        held = getattr(module, "__dict__", None)
        if not isinstance(module, ModuleType) or held is None or module.__name__.split(".")[0] in own:
            continue
        for name in [name for name, value in list(held.items()) if value is stock]:
            found.append((module, name, stock))
            setattr(module, name, ours)
    return found


def values_of(found: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return, by field, the values that :func:`read_variables` or :func:`read_arguments` found. Not collective."""
    return {field: value for field, (_, value) in found.items()}
