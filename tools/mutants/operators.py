"""Mutations that Cosmic Ray does not have: one condition dropped, one statement dropped."""

from __future__ import annotations

import re
from collections.abc import Iterator

import cosmic_ray.plugins
from cosmic_ray.operators.operator import Example, Operator
from parso.python.tree import Name
from parso.tree import BaseNode, NodeOrLeaf

from tools.mutants import settings

Span = tuple[tuple[int, int], tuple[int, int]]


class DropCondition(Operator):
    """Drops one operand of an `and` or an `or`."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Span]:
        if node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: BaseNode, index: int) -> NodeOrLeaf:
        left = list(node.children)
        first = left[0].get_first_leaf()
        before = first.prefix
        # With an operand goes the keyword in front of it; with the first one, the keyword behind it.
        del left[max(0, 2 * index - 1) : max(2, 2 * index + 1)]
        left[0].get_first_leaf().prefix = before
        if len(left) == 1:
            return left[0]
        node.children = left
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("if a and b: pass", "if b: pass"),
            Example("if a and b: pass", "if a: pass", occurrence=1),
            Example("x = a or b or c", "x = a or c", occurrence=1),
        )


class DropStatement(Operator):
    """Drops a statement that is a call, or sets an attribute or an element."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Span]:
        if node.type != "simple_stmt":
            return
        what = node.children[0]
        if what.type == "expr_stmt":
            # Without its attributes, or a local name, nothing works: that says nothing about tests.
            function = node.search_ancestor("funcdef")
            if what.children[0].type != "atom_expr" or (function is not None and function.name.value == "__init__"):
                return
        elif what.type != "atom_expr" or what.children[-1].type != "trailer" or what.children[-1].children[0] != "(":
            return
        yield what.start_pos, what.end_pos

    def mutate(self, node: BaseNode, index: int) -> NodeOrLeaf:
        what = node.children[0]
        node.children[0] = Name("pass", what.start_pos, what.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("f(x)\n", "pass\n"),
            Example("def f(a):\n    a.b = 1\n", "def f(a):\n    pass\n"),
        )


cosmic_ray.plugins.OPERATOR_PROVIDERS["shard"] = {c.__name__: c for c in (DropCondition, DropStatement)}


def operators() -> list[tuple[str, Operator]]:
    """Return the operators that settings.py allows, by name."""
    names = [n for n in cosmic_ray.plugins.operator_names() if any(re.fullmatch(p, n) for p in settings.OPERATORS)]
    return [(name, cosmic_ray.plugins.get_operator(name)()) for name in sorted(names)]
