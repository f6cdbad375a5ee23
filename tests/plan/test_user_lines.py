"""The line that a message names is one of the user's, or of a library that the user calls."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from torch_shard.plan.user_lines import line_of


def named(file: Path) -> str:
    """Return the line that is named where code of `file` calls."""
    scope = {"call": lambda: line_of(sys._getframe(1))}
    exec(compile("def caller():\n    return call()\nfound = caller()", str(file), "exec"), scope)
    return scope["found"]


def test_libraries_whose_names_begin_with_torch_are_not_torch():
    packages = Path(torch.__file__).parents[1]
    assert named(packages / "torchvision" / "ops.py") == f"{packages}/torchvision/ops.py:2 in caller"
    assert "user_lines" in named(packages / "torch" / "nn" / "linear.py")


def test_of_an_error_the_innermost_line_counts_that_is_not_torchs():
    with pytest.raises(RuntimeError) as raised:
        torch.nn.functional.linear(torch.ones(1), torch.ones(2, 2))
    assert line_of(raised.tb).endswith("in test_of_an_error_the_innermost_line_counts_that_is_not_torchs")
    assert line_of(None) == "an unknown line"
