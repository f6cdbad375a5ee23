"""Lightning's tests under another strategy: which of them name DDP or get it by default, and their text with ours named instead.

Two things change: string literals that are a name (``"ddp_spawn"``, also as a parameter of a parametrized test or on one side
of a comparison) or quote one (``"strategy='ddp'"``), and what the imported name ``DDPStrategy`` stands for, so that
``isinstance(trainer.strategy, DDPStrategy)`` asks for ours. Names of functions, docstrings, comments and patched paths stay.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from typing import Any

__all__ = ["functions_that_change", "renamed", "rewritten"]

_NAME = re.compile(r"ddp(?P<how>_spawn|_fork|_notebook)?(_find_unused_parameters_(true|false))?")
_ALONE = (1, "1", "auto", None)  # as a number of devices or nodes on a CPU
_QUOTED = re.compile(r"(\bstrategy='?)(ddp\w*)")


def renamed(name: str, family: str = "shard", start: str = "fork") -> str | None:
    """The name in a family of strategies for one of DDP's names; None for any other string.

    Args:
        name: any string.
        family: ``"shard"``, or ``"ddp"`` to change no more than how ranks start.
        start: ``"fork"`` or ``"spawn"``, for names that say spawn.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    how = f"_{start}" if match["how"] == "_spawn" else match["how"] or ""
    if family == "ddp":
        return f"ddp{how}{match[2] or ''}"
    return family + how.replace("notebook", "fork")


def rewritten(source: str, family: str = "shard", start: str = "fork") -> str:
    """The text of a test file with the names and the class replaced, every line else in its place."""
    lines = source.splitlines(keepends=True)
    tokens = [
        token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.STRING
    ]
    for token in reversed(tokens):  # from the end, so that the positions of those before stay
        (row, begin), (last, end) = token.start, token.end
        if row == last:
            text = _renamed_literal(token.string, family, start)
            lines[row - 1] = lines[row - 1][:begin] + text + lines[row - 1][end:]
    if family == "shard":
        for row, line in _imports_of_class(source):
            lines[row - 1] += line
    return "".join(lines)


def _renamed_literal(literal: str, family: str, start: str) -> str:
    name = renamed(_value(literal), family, start)
    if name is not None:
        return f'"{name}"'
    # Messages that a test expects quote the call or the command line.
    return _QUOTED.sub(lambda match: match[1] + (renamed(match[2], family, start) or match[2]), literal)


def _imports_of_class(source: str) -> Iterator[tuple[int, str]]:
    """Lines to put after the row in which an import of ``DDPStrategy`` ends."""
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "DDPStrategy" for alias in statement.names):
            ours = "fabric.for_lightning import ShardFabricStrategy"
            if (statement.module or "").startswith("lightning.pytorch"):
                ours = "for_lightning import ShardStrategy"
            yield statement.end_lineno or statement.lineno, f"from lightning_shard.{ours} as DDPStrategy\n"


def _value(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal))
    except (SyntaxError, ValueError):  # an f-string, before Python 3.12
        return ""


def functions_that_change(source: str) -> set[str]:
    """Tests of a file, functions or methods, for which DDP may be chosen, or which use something of the file for which it may be.

    They name DDP, or several devices without a strategy, for which Lightning chooses DDP.
    """
    tree = ast.parse(source)
    named: dict[str, ast.stmt] = {}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            named[statement.name] = statement
        elif isinstance(statement, ast.Assign):
            named.update({target.id: statement for target in statement.targets if isinstance(target, ast.Name)})
    changing = {name for name, statement in named.items() if any(map(_names_ddp, ast.walk(statement)))}
    while True:
        users = {name for name, statement in named.items() if name not in changing and _used(statement) & changing}
        if not users:
            break
        changing |= users
    return {function for name in changing for function in _tests_of(named[name])}


def _names_ddp(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return renamed(str(node.value)) is not None
    given: dict[Any, ast.expr | None] = {}
    if isinstance(node, ast.Call):
        given = {keyword.arg: keyword.value for keyword in node.keywords}
    elif isinstance(node, ast.Dict):
        given = {getattr(key, "value", None): value for key, value in zip(node.keys, node.values, strict=True)}
    values = {name: getattr(value, "value", "?") for name, value in given.items()}
    sizes = (values.get("devices"), values.get("num_nodes"))
    return values.get("strategy", "auto") == "auto" and any(size not in _ALONE for size in sizes)


def _used(statement: ast.stmt) -> set[str]:
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    # Fixtures are used as parameters.
    return names | {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}


def _tests_of(statement: ast.stmt) -> set[str]:
    functions = statement.body if isinstance(statement, ast.ClassDef) else [statement]
    return {f.name for f in functions if isinstance(f, ast.FunctionDef) and f.name.startswith("test")}
