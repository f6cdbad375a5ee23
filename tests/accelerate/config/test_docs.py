"""docs/accelerate.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from accelerate_shard.settings import from_deepspeed
from accelerate_shard.settings.from_environment import settings_table
from accelerate_shard.settings.from_fsdp import table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"


def test_the_tables_are_those_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for wanted in (table(), settings_table(), from_deepspeed.table()):
        assert wanted in text, f"docs/accelerate.md lacks this table; put it there:\n\n{wanted}"
