"""``enable()`` for scripts and notebooks that are left as they are."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import accelerate
import pytest

import accelerate_shard
from accelerate_shard import ShardConfig, ShardPlugin
from tests.accelerate.support.accelerators import OURS, STOCK, clean_state
from tests.accelerate.support.launching import SCRIPT
from tests.support.run_python import run_python
from torch_shard.errors import ConfigError


def test_names_imported_before_and_after_are_ours_until_disable() -> None:
    stock = STOCK
    before = types.ModuleType("a_notebook")
    before.__dict__["Acc"] = stock
    sys.modules["a_notebook"] = before
    try:
        with clean_state():
            accelerate_shard.enable(ShardConfig(prefetch=2))
            from accelerate import Accelerator as after

            assert after is OURS and before.__dict__["Acc"] is OURS
            assert accelerate.accelerator.Accelerator is OURS
            assert after(cpu=True).shard_plugin == ShardPlugin(prefetch=2)
            accelerate_shard.enable()  # the settings are replaced
        with clean_state():
            assert accelerate.Accelerator(cpu=True).shard_plugin == ShardPlugin()
    finally:
        accelerate_shard.disable()
        del sys.modules["a_notebook"]
    assert accelerate.Accelerator is stock and before.__dict__["Acc"] is stock
    accelerate_shard.disable()


def test_enable_with_something_else_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = accelerate.Accelerator
    with clean_state():
        with pytest.raises(ConfigError, match="shard_plugin"):
            accelerate_shard.enable("full_shard")  # type: ignore[arg-type]
        monkeypatch.setenv("SHARD_STRATEGIE", "full_shard")
        with pytest.raises(ConfigError, match="SHARD_STRATEGY"):
            accelerate_shard.enable()
    assert accelerate.Accelerator is stock


@pytest.mark.exhaustive
def test_a_trainer_that_is_imported_later_is_changed_and_changed_back() -> None:
    code = """
import accelerate_shard
accelerate_shard.enable()
from transformers import Trainer
import transformers.trainer
applied = Trainer.create_accelerator_and_postprocess
assert hasattr(applied, "_torch_shard_own")
assert transformers.trainer.Accelerator is accelerate_shard.Accelerator
accelerate_shard.disable()
assert Trainer.create_accelerator_and_postprocess is applied._torch_shard_own
assert transformers.trainer.Accelerator.__module__ == "accelerate.accelerator"
"""
    run_python("-c", code)


@pytest.mark.exhaustive
def test_the_notebook_launcher_trains_on_two_ranks(tmp_path: Path) -> None:
    code = (
        SCRIPT.replace('if __name__ == "__main__":\n    main()\n', "").replace(
            "import torch\n", "import accelerate_shard\nimport torch\n", 1
        )
        + """
accelerate_shard.enable()
assert Accelerator is accelerate_shard.Accelerator
from accelerate import notebook_launcher
notebook_launcher(main, num_processes=2, use_port="0", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0")
print("done")
"""
    )
    path = tmp_path / "notebook.py"
    path.write_text(code, encoding="utf-8")
    done = run_python(path, folder=tmp_path)
    assert '"ranks": 2' in done.stdout and '"class": "accelerate_shard.accelerator"' in done.stdout, done.stderr
    assert "done" in done.stdout
