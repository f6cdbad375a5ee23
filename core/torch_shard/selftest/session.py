"""The parent's side: checks what the user asks for, starts ranks for each part, and turns what they leave into results."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, UnavailableError
from . import devices
from .cases import cases_of
from .context import EXIT, JOB, NOTES, Case, Setting
from .results import PARTS, Result, skipped

_ATTEMPTS = 4  # launches of a part that end with an error before the cases that are left are given up
_GRACE = 45.0  # seconds that torch's launcher gets to end the ranks, which takes it 30 at most


def checked_setting(kind: str, ranks: int | None, quick: bool, peak_tflops: float | None, shares: bool) -> Setting:
    """Return the setting for a choice of devices and ranks. This does not initialise any device.

    Args:
        kind: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        ranks: the number of ranks; None for all GPUs, or two on the CPU.
        quick: choose small models and few rounds.
        peak_tflops: the device's peak, in TFLOP/s.
        shares: let ranks share GPUs if there are too few.

    Raises:
        ConfigError: the devices or ranks asked for are not there.
        UnavailableError: torch lacks what ranks need to communicate.
    """
    there = devices.count()
    kind = ("cuda" if there else "cpu") if kind == "auto" else kind
    if kind == "cuda" and not there:
        raise ConfigError("--device cuda: torch sees no GPU here. Use --device cpu, or a torch built for the GPU.")
    ranks = (there if kind == "cuda" else 2) if ranks is None else ranks
    if ranks < 1:
        raise ConfigError(f"--ranks must be 1 or more, not {ranks}.")
    if shares and kind == "cpu":
        raise ConfigError("--share-gpus: the ranks run on the CPU.")
    shares = shares and ranks > there
    if kind == "cuda" and ranks > there and not shares:
        raise ConfigError(
            f"--ranks {ranks}: each rank needs a GPU of its own, and torch sees {there}. Use fewer ranks, or --share-gpus."
        )
    if kind == "cuda" and not torch.distributed.is_nccl_available():
        raise UnavailableError("this build of torch has no NCCL, over which GPUs communicate; use --device cpu.")
    if peak_tflops is not None and not 0 < peak_tflops < float("inf"):
        raise ConfigError(f"--peak-tflops must be a positive number, not {peak_tflops}.")
    sanitizer = importlib.util.find_spec("torch.cuda._sanitizer")
    why_not = "" if sanitizer else "this torch has no CUDA sanitizer"
    return Setting(kind, ranks, quick, peak_tflops, why_not, shares)


def checked_parts(text: str | None) -> tuple[str, ...]:
    """Return the parts that a list such as ``"memory,speed"`` names, in their own order; all for None.

    Raises:
        ConfigError: there is no such part.
    """
    if text is None:
        return PARTS
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in PARTS:
            raise ConfigError(f"--only: {name!r} is not a part; the parts are {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in chosen)


@dataclass
class Session:
    """One self-test.

    Attributes:
        setting: the devices and sizes.
        parts: the parts to run.
        pattern: a glob that the names of the cases to run match.
        seconds: the time that each part gets.
        advance: a function that is called with each case that has ended or was skipped.
        environment: versions and devices, as the ranks have reported them.
        output: the last lines that ranks printed in a launch that failed. They may have paths and are for the terminal alone.
    """

    setting: Setting
    parts: Sequence[str] = PARTS
    pattern: str = "*"
    seconds: float = 1800.0
    advance: Callable[[Case], object] = lambda case: None
    environment: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    def cases(self, *parts: str) -> list[Case]:
        """Return the chosen cases of some parts, by default of all that are chosen.

        Raises:
            ConfigError: there are none.
        """
        cases = [case for part in parts or self.parts for case in cases_of(part, self.setting)]
        chosen = [case for case in cases if fnmatch.fnmatchcase(case.name, self.pattern)]
        if not chosen and not parts:
            names = ", ".join(repr(case.name) for case in cases[:3])
            raise ConfigError(f"--case {self.pattern!r} is the name of no case of these parts; the first are {names}.")
        return chosen

    def run(self, part: str) -> list[Result]:
        """Run the cases of a part, and return their results in the order of the cases."""
        cases = self.cases(part)
        found: dict[str, list[Result]] = {}
        for case in cases:
            if case.skip:
                found[case.name] = [skipped(part, case.name, case.skip)]
                self.advance(case)
        deadline, failures = time.monotonic() + self.seconds, 0
        while left := [case for case in cases if case.name not in found]:
            together = [case for case in left if case.sanitized == left[0].sanitized]
            why_not = f"the {self.seconds:g} s of this part were over" if time.monotonic() >= deadline else ""
            if failures == _ATTEMPTS:
                why_not = f"{_ATTEMPTS} cases before it have ended their ranks"
            if why_not:
                for case in left:
                    found[case.name] = [skipped(part, case.name, f"not run: {why_not}")]
                    self.advance(case)
                break
            launched, good = self._launch(together, deadline)
            found |= launched
            failures += not good
        return [result for case in cases for result in found[case.name]]

    def _launch(self, cases: Sequence[Case], deadline: float) -> tuple[dict[str, list[Result]], bool]:
        """Run cases in new ranks until one ends the ranks, if one does.

        Returns:
            Results by case, of one case at least, and whether all cases came to an end.
        """
        with tempfile.TemporaryDirectory(prefix="torch-shard-selftest-") as name:
            folder = Path(name)
            job = {"part": cases[0].part, "names": [case.name for case in cases], "seconds": self.seconds}
            (folder / JOB).write_text(json.dumps({**job, "setting": dataclasses.asdict(self.setting)}))
            timed_out = self._wait_for_ranks(folder, cases, deadline)
            notes = [line for file in sorted(folder.glob(f"{NOTES}-*.jsonl")) for line in _read_notes(file)]
            self.environment = next((n["environment"] for n in notes if "environment" in n), {}) or self.environment
            found = {n["ended"]: [Result(**each) for each in n["results"]] for n in notes if "ended" in n}
            failed = next((case for case in cases if case.name not in found), None)
            if failed is not None:
                reason = self._why(folder, failed, notes, timed_out)
                found[failed.name] = [Result(failed.part, failed.name, "failed", reason=reason)]
                self.advance(failed)
            elif (folder / EXIT).exists():  # a rank that can't leave the process group, say
                name, reason = f"{cases[-1].name}: the end of its ranks", (folder / EXIT).read_text()
                found[cases[-1].name].append(Result(cases[-1].part, name, "failed", reason=reason))
            else:
                return found, True
            self.output = "\n".join((folder / "output.txt").read_text(errors="replace").splitlines()[-30:])
            return found, False

    def _why(self, folder: Path, case: Case, notes: list[dict[str, Any]], timed_out: bool) -> str:
        errors = sorted((n for n in notes if "error" in n and n["case"] in (case.name, None)), key=lambda n: n["at"])
        # What a rank raised because another one did not come explains less than what that one raised.
        errors.sort(key=lambda n: n["error"].startswith("MissingRankError"))
        texts = [f"rank {n['rank']}: {n['error']}" for n in errors[:1]]
        if (folder / EXIT).exists():
            texts.append((folder / EXIT).read_text())  # which rank failed first, and how
        elif timed_out:
            texts.append(f"the ranks had not ended it when the {self.seconds:g} s of this part were over")
        if not any(n.get("begun") == case.name for n in notes):
            texts.append("the ranks had not begun it")
        return "; ".join(texts) or "the ranks ended without a result"

    def _wait_for_ranks(self, folder: Path, cases: Sequence[Case], deadline: float) -> bool:
        """Run the launcher, calling `advance` meanwhile, and return True if it had to be ended at the deadline."""
        command = [sys.executable, "-m", "torch_shard.selftest.launcher", str(folder), str(self.setting.ranks)]
        # A cluster's settings for torchrun (PET_*) are for programs that run on all its machines.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
        threads = max(1, len(os.sched_getaffinity(0)) // self.setting.ranks)  # which update what is offloaded
        variables = {"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR", **inherited}
        if cases[0].sanitized:
            variables["TORCH_CUDA_SANITIZER"] = "1"
        by_name, seen = {case.name: case for case in cases}, 0
        with open(folder / "output.txt", "wb") as output, _started(command, variables, output) as process:
            running = True
            while running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
                running = process.poll() is None
                ended = [n["ended"] for n in _read_notes(folder / f"{NOTES}-0.jsonl") if "ended" in n]
                for name in ended[seen:]:
                    self.advance(by_name[name])
                seen = len(ended)
                if running and time.monotonic() > deadline:
                    return True
        return False


@contextlib.contextmanager
def _started(command: list[str], variables: dict[str, str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program in a session of its own, and end it with all that it has started if it is left before it has ended."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # torch's launcher ends its ranks, which have sessions of their own
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _read_notes(file: Path) -> list[dict[str, Any]]:
    """Return the notes of a rank so far. A line that is being written is left for the next time."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
