"""What `make mutants` mutates is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutants import settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", settings.PARTS)
def test_each_part_of_the_mutated_engine_has_files(part):
    missing = [pattern for pattern in settings.PARTS[part] if not list((ROOT / settings.ENGINE).glob(pattern))]
    assert not missing
