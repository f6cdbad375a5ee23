"""Which parameters of a test run every time, and which only in the exhaustive set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*values: Any) -> list[Any]:
    """Parameters with which a test only runs in ``make test-all``; a tuple is the values of several arguments.

    ::

        @pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
    """
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.exhaustive) for v in values]


def seldom(*values: Any) -> list[Any]:
    """The same for usual values of a test of tests/compat, which ``make test-all`` runs in every mode (see its conftest.py)."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.exhaustive(usual=True)) for v in values
    ]


def quick(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """All `values` in their order, of which only the `chosen` ones run every time."""
    values, chosen = list(values), list(chosen)
    assert all(value in values for value in chosen), f"{chosen} of {values}"
    return [value if value in chosen else exhaustive(value)[0] for value in values]


def one_at_a_time(**axes: list[Any]) -> Any:
    """Arguments of a test, each with its usual value first: the usual row runs every time; in the exhaustive set each argument
    has its other values in turn, beside the usual ones of the others.

    ::

        @one_at_a_time(optimizer=["AdamW", "SGD"], strategy=["full_shard", "shard_grad_op", "no_shard"])  # four rows
    """
    usual = {name: values[0] for name, values in axes.items()}
    rows = [tuple({**usual, name: value}.values()) for name, values in axes.items() for value in values[1:]]
    if len(axes) == 1:
        return pytest.mark.parametrize(*axes, [*usual.values(), *exhaustive(*(value for (value,) in rows))])
    return pytest.mark.parametrize(tuple(axes), [tuple(usual.values()), *exhaustive(*rows)])
