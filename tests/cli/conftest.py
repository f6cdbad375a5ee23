"""One set of checkpoints for all tests of the command line, which leave it as it is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.makers import RANKS, lightning_net, make_all
from tests.lightning.support import loader, single
from tests.support.ranks import run
from torch_shard.cli import main

Command = Callable[..., Any]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the checkpoints of makers.py, and a single-device Trainer's ``trainer.ckpt``."""
    folder = tmp_path_factory.mktemp("cli")
    trainer = single("lightning")
    trainer.fit(lightning_net(), loader(1))
    trainer.save_checkpoint(folder / "trainer.ckpt")
    run(RANKS, make_all, folder, torch.load(folder / "trainer.ckpt", weights_only=True), timeout=100)
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies a checkpoint to where it may be damaged."""

    def copy(name: str) -> Path:
        target = tmp_path / name
        if (made / name).is_dir():
            shutil.copytree(made / name, target)
        else:
            shutil.copy(made / name, target)
        return target

    return copy


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command line in this process, and gives what it printed; a JSON object is parsed."""

    def run_it(*arguments: Any, expected: int = 0) -> Any:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == expected, (code, out, err)
        if expected == 2:
            assert out == "" and err.count("\n") == 1 and "Traceback" not in err, (out, err)
            return err
        return json.loads(out) if "--json" in arguments else out

    return run_it
