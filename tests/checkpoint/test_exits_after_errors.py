"""A damaged folder is the same error on all ranks, also if the first one that has it ends its process at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.helpers import build, load, save
from tests.checkpoint.test_bad_files import DAMAGE, wide
from tests.support.leaving import left_with
from tests.support.marks import quick
from tests.support.ranks import run

KINDS = ["a bit of a parameter", "a file missing", "a bit of the manifest", "no metadata"]


def saves(rank: int, world_size: int, folder: Path) -> None:
    _, engine, optimizer = build(model=wide)
    save(engine, folder, optimizer)


def loads(rank: int, world_size: int, folder: Path) -> None:
    _, engine, optimizer = build(model=wide)
    load(engine, folder, optimizer)


@pytest.mark.parametrize("kind", quick(KINDS, KINDS[:1]))
@pytest.mark.parametrize("first", [0, 1])
def test_all_ranks_end_with_the_error_of_the_folder(kind: str, first: int, tmp_path: Path) -> None:
    run(2, saves, tmp_path / "c")
    DAMAGE[kind][0](tmp_path / "c")
    errors = left_with(loads, tmp_path / "c", first=first, folder=tmp_path)
    assert [error.split(":")[0] for error in errors] == ["CheckpointError"] * 2, errors
