"""Which mutants there are, and which are drawn."""

from __future__ import annotations

import ast
import random
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.ast.ast_query import ASTQuery
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec, WorkItem

from tools.mutants import settings, tree
from tools.mutants.operators import operators

_Site = tuple[Path, tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class _Choice:
    """One way to change a place."""

    name: str
    operator: Operator
    occurrence: int
    definition: str | None


def draw() -> list[WorkItem]:
    """Return the mutants, the same number from each part, in turns. Their ids say the order."""
    count = -(-settings.COUNT // len(settings.PARTS))
    drawn = [_drawn(part, count) for part in settings.PARTS]
    mixed = [spec for specs in zip_longest(*drawn) for spec in specs if spec is not None]
    return [WorkItem.single(f"{number:03d}", spec) for number, spec in enumerate(mixed[: settings.COUNT])]


def _drawn(part: str, count: int) -> list[MutationSpec]:
    sites: dict[_Site, list[_Choice]] = defaultdict(list)
    sources = {path: path.read_text() for path in tree.files(part)}
    for path, source in sources.items():
        nodes = list(ast_nodes(get_ast(source)))
        for name, operator in operators():
            places = [(node, *span) for node in nodes for span in operator.mutation_positions(node)]
            for occurrence, (node, start, end) in enumerate(places):
                if start < end and not (name == "core/NumberReplacer" and node.value not in settings.NUMBERS):
                    definition = ASTQuery(node).get_definition_name()
                    sites[path, start, end].append(_Choice(name, operator, occurrence, definition))
    # A place is drawn first, then what happens to it: an operator with many forms counts no more than another.
    # Its part's own generator: files that are moved from one part to another leave the rest as it was.
    chance = random.Random(f"{settings.SEED} {part}")
    order = sorted(sites)
    chance.shuffle(order)
    meanings = {path: _meaning(source) for path, source in sources.items()}
    specs: list[MutationSpec] = []
    for path, start, end in order:
        if len(specs) == count:
            break
        choice = chance.choice(sites[path, start, end])
        mutated = mutate_code(sources[path], choice.operator, choice.occurrence)
        if mutated is None or _meaning(mutated) in (None, meanings[path]):
            continue
        specs.append(MutationSpec(path, choice.name, choice.occurrence, start, end, {}, choice.definition))
    return specs


class _Meaning(ast.NodeTransformer):
    """Takes away what has no meaning when the engine runs.

    Annotations, docstrings, texts of errors and logs, and what only states what holds anyway: asserts, which tell mypy, and
    zip's strict. Mutants that differ from the engine in nothing else are none.
    """

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        names = [ast.unparse(d) for d in node.decorator_list]
        node.decorator_list = [
            d
            for d, name in zip(node.decorator_list, names, strict=True)
            if not re.search(r"abstractmethod|overload", name)
        ]
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and "dataclass" in ast.unparse(decorator.func):
                decorator.keywords = []  # frozen, slots: what is set all the same shows in mypy
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        self.generic_visit(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        # At the top level or in a class, `Pair = tuple[A, B] | None` and the like name a type.
        named = (
            isinstance(node.value, (ast.BinOp, ast.Subscript))
            and ast.unparse(node.targets[0]).lstrip("_")[:1].isupper()
        )
        if named and not any(isinstance(n, ast.Constant) and isinstance(n.value, int) for n in ast.walk(node.value)):
            return None
        self.generic_visit(node)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST | None:
        return ast.Pass()

    def visit_If(self, node: ast.If) -> ast.AST:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            node.test, node.body = ast.Constant(False), [ast.Pass()]
        self.generic_visit(node)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        if isinstance(node.exc, ast.Call):
            node.exc.args, node.exc.keywords = [], []
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        if isinstance(node.value, ast.Constant):
            return ast.Pass()
        if isinstance(node.value, ast.Call) and re.match(r"_?(log|logger|warnings)\b", ast.unparse(node.value.func)):
            return ast.Pass()
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == "zip":
            node.keywords = []  # strict
        self.generic_visit(node)
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("text")


def _meaning(source: str) -> str | None:
    """Return what tells a source from others, or None where it is no Python."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
        return ast.dump(_Meaning().visit(ast.parse(source)))
    except SyntaxError:
        return None


def lines(spec: MutationSpec) -> set[int]:
    """Return the lines of which one is executed whenever the mutation could show."""
    module = ast.parse(spec.module_path.read_text())
    row = spec.start_pos[0]
    found: ast.AST = module
    for node in ast.walk(module):  # outer ones first
        if isinstance(node, (ast.stmt, ast.ExceptHandler)) and _first(node) <= row <= (node.end_lineno or 0):
            found = node
    if isinstance(found, (ast.FunctionDef, ast.ClassDef, ast.Module)):
        within = found.body
    elif enclosing := _class_or_module(module, found):  # runs when it is imported: what uses it?
        within = enclosing.body
    else:
        body = getattr(found, "body", None)
        last = body[0].lineno - 1 if body else found.end_lineno  # type: ignore[attr-defined]
        return set(range(_first(found), max(_first(found), last) + 1))
    return {line for s in within for line in range(_first(s), (s.end_lineno or 0) + 1)}


def function(spec: MutationSpec) -> set[int]:
    """Return the lines of the function around a mutation; none outside of functions."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(spec.module_path.read_text())):  # outer ones first
        if isinstance(node, ast.FunctionDef) and node.lineno <= spec.start_pos[0] <= (node.end_lineno or 0):
            found = set(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def _first(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])  # type: ignore[attr-defined]


def _class_or_module(module: ast.Module, statement: ast.AST) -> ast.Module | ast.ClassDef | None:
    """Return the class or module in whose body a statement is executed; None for one in a function."""
    inside: ast.Module | ast.ClassDef = module
    for node in ast.walk(module):  # outer ones first
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node is statement:
            continue
        if node.lineno <= statement.lineno <= (node.end_lineno or 0):  # type: ignore[attr-defined]
            if isinstance(node, ast.FunctionDef):
                return None
            inside = node
    return inside
