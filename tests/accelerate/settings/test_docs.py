"""docs/accelerate.md names every setting that the code reads."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from accelerate.commands.config import cluster

from accelerate_shard.settings.from_environment import SETTINGS
from accelerate_shard.settings.from_fsdp import KEYS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "accelerate.md"


def test_every_setting_has_a_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [f"| `{s.variable}` | `{s.key}` | `{s.field}` | {s.form} |" for s in SETTINGS]
    rows += [f"| {f'`{key.yaml}`' if key.yaml else 'not in a YAML'} | `{key.field}` |" for key in KEYS]
    # The questionnaire of `accelerate config` is the list of DeepSpeed's keys: deepspeed_config["..."] = ...
    asked = set(re.findall(r'deepspeed_config\[\s*"(\w+)"\s*\]', inspect.getsource(cluster)))
    assert asked
    rows += [f"| `{key}` |" for key in asked]
    assert [row for row in rows if row not in text] == []
