"""Starts a program, as its users do, and collects what it has recorded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .program import Program
from .sources import ROOT

__all__ = ["Run", "run"]

_HERE = ROOT / "tests" / "outside"
# Of this process's environment: no launcher's or login's settings, and none of this package's.
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass
class Run:
    """What one run of a program has left.

    Attributes:
        folder: its working directory.
        failed: False, or True if it ended with an error.
        output: what it wrote to both of its streams.
        losses: by rank, of every backward.
        models: by rank, how many models were wrapped by DDP and how many were sharded.
    """

    folder: Path
    failed: bool = False
    output: str = ""
    losses: dict[str, list[float]] = field(default_factory=dict)
    models: dict[str, Counter[str]] = field(default_factory=dict)


def run(program: Program, command: Sequence[str], arguments: Sequence[str], data: Path, place: Path) -> Run:
    """Run a program, and what it says should follow, in ``place/work``.

    Args:
        command: what comes behind ``python``, with the program's path.
        arguments: of the program, besides its own.
        data: the folder that `program` has prepared.
        place: an empty folder for working directory, records and caches.
    """
    found = Run(place / "work")
    record = place / "record"
    for folder in (record, place / "home"):
        folder.mkdir(parents=True)
    if (data / "work").is_dir():
        shutil.copytree(data / "work", found.folder)
    else:
        found.folder.mkdir()
    for name in program.beside:
        shutil.copy(Path(command[-1]).parent / name, found.folder / name)
    environment = {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "HOME": str(place / "home"),
        "HF_HOME": str(place / "home" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (_HERE / "in_process", ROOT / "core", ROOT))),
        "OUTSIDE_RECORD": str(record),
        "OUTSIDE_STAND_INS": os.pathsep.join(str(_HERE / "stand_ins" / f"{name}.py") for name in program.stand_ins),
        **{name: value.format(data=data) for name, value in program.environment.items()},
    }
    for own in (program.arguments, *program.then):
        filled = [part.replace("{data}", str(data)) for part in (*own, *arguments)]
        line = [sys.executable, *(part.replace("{ranks}", str(program.ranks)) for part in command), *filled]
        found.failed, output = _finished(line, found.folder, environment, program.limit)
        found.output += f"$ {' '.join(line)}\n{output}\n"
        if found.failed:
            break
    (place / "output.txt").write_text(found.output)
    for name in program.beside:
        (found.folder / name).unlink()
    for path in sorted(record.glob("rank*.jsonl")):
        rank = path.stem.removeprefix("rank")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.losses[rank] = [value for kind, value in records if kind == "loss"]
        found.models[rank] = Counter(value for kind, value in records if kind == "model")
    return found


def _finished(line: Sequence[str], folder: Path, environment: dict[str, str], limit: float) -> tuple[bool, str]:
    """Run a command to its end; return whether it failed, and its output. After `limit` seconds all its processes are killed."""
    with subprocess.Popen(
        line, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode != 0, output
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            return True, process.communicate()[0] + f"\nkilled after {limit} seconds\n"
        except BaseException:
            _kill(process.pid)
            raise


def _kill(number: int) -> None:
    """Kill a process and all below it, which torchrun puts into sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(number)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
