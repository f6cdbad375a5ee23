"""Starts a program, as its users do, and collects what it has recorded."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .program import Program
from .sources import ROOT

__all__ = ["Run", "run"]

_HERE = ROOT / "tests" / "outside"
_END = 60.0  # seconds without work, once a rank has ended, after which the others are said to hang
_WORK = 3.0  # seconds of CPU time that are work; a launcher's polling is less
# Of this process's environment: no launcher's or login's settings, and none of this package's.
_KEPT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")


@dataclass
class Run:
    """What one run of a program has left.

    Attributes:
        folder: its working directory.
        failed: False, or True if it ended with an error.
        hung: True if a rank had come to its end, and the run did not end nor work any more; it was killed then.
        output: what it wrote to both of its streams.
        losses: by rank, of every backward.
        models: by rank, how many models were wrapped by DDP and how many were sharded.
    """

    folder: Path
    failed: bool = False
    hung: bool = False
    output: str = ""
    losses: dict[str, list[float]] = field(default_factory=dict)
    models: dict[str, Counter[str]] = field(default_factory=dict)

    def move(self, place: Path) -> None:
        """Move all of the run's folders to another place."""
        self.folder.parent.rename(place)
        self.folder = place / self.folder.name


def run(
    program: Program,
    command: Sequence[str],
    arguments: Sequence[str],
    data: Path,
    place: Path,
    stand_ins: Sequence[str] = (),
) -> Run:
    """Run a program, and what it says should follow, in ``place/work``.

    Args:
        command: what comes behind ``python``, with the program's path.
        arguments: of the program, besides its own.
        data: the folder that `program` has prepared.
        place: an empty folder for working directory, records and caches.
        stand_ins: names of files, besides the program's own.
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
    imports = [found.folder / name for name in program.imports_from]
    if imports and "OUTSIDE_PACKAGES" in os.environ:
        imports.append(Path(os.environ["OUTSIDE_PACKAGES"]))
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
        "PYTHONPATH": os.pathsep.join(map(str, (_HERE / "in_process", ROOT / "core", ROOT, *imports))),
        "OUTSIDE_RECORD": str(record),
        "OUTSIDE_STAND_INS": os.pathsep.join(
            str(_HERE / "stand_ins" / f"{name}.py") for name in (*program.stand_ins, *stand_ins)
        ),
        **{name: value.format(data=data) for name, value in program.environment.items()},
    }
    for number, own in enumerate((program.arguments, *program.then), 1):
        filled = [part.replace("{data}", str(data)) for part in (*own, *arguments)]
        line = [sys.executable, *(part.replace("{ranks}", str(program.ranks)) for part in command), *filled]
        with (place / "output.txt").open("a") as output:
            output.write(f"$ {' '.join(line)}\n")
            output.flush()
            with subprocess.Popen(
                line,
                cwd=found.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process:
                hung = not _ends(process, program.limit, lambda n=number: _ended(record) > (n - 1) * program.ranks)
        found.hung |= hung
        found.failed = process.returncode != 0 and not hung
        if found.failed:
            break
    found.output = (place / "output.txt").read_text(errors="replace")
    for name in program.beside:
        (found.folder / name).unlink()
    for path in sorted(record.glob("rank*.jsonl")):
        rank = path.stem.removeprefix("rank")
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found.losses[rank] = [value for kind, value in records if kind == "loss"]
        found.models[rank] = Counter(value for kind, value in records if kind == "model")
    return found


def _ends(process: subprocess.Popen[bytes], limit: float, at_end: Callable[[], bool]) -> bool:
    """Wait for a launcher; after `limit` seconds it is killed with all below it.

    Threads of Gloo and of Python can wait for each other while a process group is dropped. That is told from a rank that still
    works, when the other has ended, by the CPU time.

    Returns:
        False if it was killed because its processes did nothing for a minute after `at_end` was true.
    """
    deadline, last, used = time.monotonic() + limit, math.inf, 0.0
    try:
        while process.poll() is None:
            time.sleep(0.2)
            if last == math.inf and not at_end():
                pass
            elif (now := _cpu_time(process.pid)) > used + _WORK or last == math.inf:
                last, used = time.monotonic() + _END, now
            if time.monotonic() > min(deadline, last):
                _kill(process.pid)
                process.wait()
                return time.monotonic() <= last
    except BaseException:
        _kill(process.pid)
        raise
    return True


def _cpu_time(number: int) -> float:
    """Return the seconds of CPU time of a process and of all below it."""
    total = 0.0
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(number)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def _ended(record: Path) -> int:
    """Return how many rank processes have come to their end so far."""
    return sum(path.read_text().count('["end"') for path in record.glob("rank*.jsonl"))


def _kill(number: int) -> None:
    """Kill a process and all below it, which torchrun puts into sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(number)
        for process in [parent, *parent.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
