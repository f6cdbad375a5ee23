"""The places in the engine's code that order a device's work, as its source has them.

Some ask the streams, an event or a collective's ``Work`` themselves. Others call a function that does so for its caller, such as
``unit.wait()`` or ``with c.reducing()``. Each such call is a place of its own, because it may be missing while others are there.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch_shard

CORE = Path(torch_shard.__file__).parent
LAYER = "comm/streams.py"
PREDICTS = "plan/"  # where units are stood in for, and no device works

# What is called, and on what. The receiver is matched as it is written, a local name by what it was assigned from.
_STREAMS = r"(.*\.)?_?streams|streams_of\(.*\)|current_streams\(\)"
_EVENT = r"(.*\.)?(_?event|begun)|self\._under_way\[0\]\[2\]"
_WORK = r"(.*\.)?_?work|dist\.\w+\(.*\)"
_CALLS = (
    (r"follow|join|wait|record|finish|synchronize", _STREAMS),
    (r"synchronize|query", _EVENT),
    (r"wait|is_completed", _WORK),
    (r"has_ended", r"work|task"),
    (r"record_stream", r".*"),
    (r"_on|gathering|_gathering|reducing|leaving", r".*"),
    (r"wait", r"(.*\.)?(_?pending|unit|there|source|local|_read|pending_writes|waits_for)|self\._works\[0\]|task"),
)

# Functions that order something for their callers, by file.
PASSED_ON = {
    "comm/collectives.py": ("_on", "gathering", "reducing"),
    "comm/work.py": ("_wait", "wait", "is_completed"),
    "comm/quantized_collectives.py": ("wait",),
    "offload/host.py": ("leaving",),
    "offload/host_shard.py": ("wait",),
    "offload/host_thread.py": ("wait", "finish"),
    "offload/pending_writes.py": ("wait", "has_ended"),
    "unit/unit.py": ("_gathering", "wait"),
    "activation_offload.py": ("wait",),
}


@dataclass(frozen=True)
class Site:
    """A call that orders something."""

    file: str
    function: str
    call: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.call}"


@functools.cache
def sites() -> dict[tuple[str, int], Site]:
    """Return the places by file and line."""
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        file = path.relative_to(CORE).as_posix()
        if file != LAYER and not file.startswith(PREDICTS):
            again: Counter[Site] = Counter()
            for node, function in _calls(ast.parse(path.read_text(encoding="utf-8"))):
                place = Site(file, function, ast.unparse(node))
                again[place] += 1
                if again[place] > 1:
                    place = Site(file, function, f"{place.call} ({again[place]})")
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    found[file, line] = place
    return found


def site_at(file: str, line: int) -> Site | None:
    """Return the place at a line of a file, if there is one."""
    return sites().get((file, line))


def _calls(module: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that order something, with the function that each is in."""
    for scope, function in _functions(module, ""):
        names: dict[str, str] = {}
        inner = list(_own(scope))
        for node in inner:
            if isinstance(node, ast.Assign):
                names.update(_assigned(node))
        for node in inner:
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            receiver = ast.unparse(node.func.value)
            written = (receiver, names.get(receiver, receiver))
            for methods, receivers in _CALLS:
                if re.fullmatch(methods, node.func.attr) and any(re.fullmatch(receivers, w) for w in written):
                    yield node, function
                    break


def _assigned(node: ast.Assign) -> Iterator[tuple[str, str]]:
    """Yield the local names that an assignment gives values to, each with the value as it is written."""
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, ast.unparse(node.value)
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts, strict=True):
                if isinstance(name, ast.Name):
                    yield name.id, ast.unparse(value)


def _functions(node: ast.AST, within: str) -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = f"{within}.{child.name}" if within else child.name
            if isinstance(child, ast.FunctionDef):
                yield child, name
            yield from _functions(child, name)
        else:
            yield from _functions(child, within)


def _own(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, except for what is in functions inside of it."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child
            yield from _own(child)
