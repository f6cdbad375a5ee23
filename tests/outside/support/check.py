"""Runs a program twice and says whether the runs are equal."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .checkpoints import consolidate
from .comparison import compare_files, compare_losses, drop_twins
from .launch import Run, run
from .program import Program

__all__ = ["Outcome", "check"]

_END = 6000  # characters of a program's output in a message


@dataclass
class Outcome:
    """A row of the table.

    Attributes:
        program: what was run.
        result: "equal", "refused", "differs", "fails", "skipped", or "fails under DDP".
        detail: how much was compared, or why it was not.
    """

    program: Program
    result: str = "fails"
    detail: str = ""

    def row(self) -> str:
        """Return the row in Markdown."""
        program = self.program
        kind = " (library)" if program.is_library else ""
        cells = (program.name + kind, f"`{program.switch.text}`", str(program.ranks), self.result, self.detail)
        return f"| {' | '.join(cells)} |"


def check(outcome: Outcome, folder: Path) -> None:
    """Run a program under DDP and under this package in two folders below `folder`, and compare.

    Args:
        outcome: its program is run, and its result is set.

    Raises:
        NotThere: the program's source is not on this machine.
        AssertionError: the runs differ, or one has failed.
    """
    program, switch = outcome.program, outcome.program.switch
    start = program.source.command()
    data = folder / "data"
    data.mkdir()
    if program.prepare is not None:
        program.prepare(data)
    place = folder / "run"  # the same for both, since programs save paths
    plain = run(program, [*switch.ddp, *start], switch.ddp_arguments, data, place, switch.ddp_stand_ins)
    plain.move(folder / "ddp")
    if plain.failed:
        outcome.result = "fails under DDP"
        raise AssertionError(_told("it fails under DDP already", plain))
    _assert_used(plain, "DDP", "shard")
    ours = run(program, [*switch.ours, *start], switch.our_arguments, data, place)
    ours.move(folder / "ours")
    if program.refused is not None:
        _assert_refused(program.refused, ours)
        outcome.result, outcome.detail = "refused", program.refused
        return
    if ours.failed or ours.hung:
        raise AssertionError(_told("it hangs at its end" if ours.hung else "it fails", ours))
    _assert_used(ours, "shard", "DDP")
    outcome.result = "differs"
    consolidate(ours.folder)
    if program.names_folders_by_second:
        drop_twins(plain.folder)
        drop_twins(ours.folder)
    losses = compare_losses(plain.losses, ours.losses, program.tolerance)
    given = [path.relative_to(data / "work").as_posix() for path in (data / "work").rglob("*") if path.is_file()]
    files = compare_files(plain.folder, ours.folder, program.tolerance, [*program.not_compared, *given])
    outcome.detail = (
        f"{losses.compared} losses, {losses.largest:.1e} apart; {files.compared} files, {files.largest:.1e} apart"
        + (" (under DDP processes hung at their end)" if plain.hung else "")
    )
    assert losses.compared or not program.losses, "no losses were compared: the program has called no backward"
    assert not losses.differences, f"{program.name}: losses differ:\n{losses.text()}"
    assert not files.differences, f"{program.name}: files differ:\n{files.text()}"
    outcome.result = "equal"


def _assert_used(found: Run, expected: str, other: str) -> None:
    """Assert that each rank has trained its models in the one way only."""
    assert found.models, _told("no model was wrapped or sharded", found)
    for rank, kinds in found.models.items():
        assert kinds[expected] and not kinds[other], f"rank {rank} has models of these kinds: {_counted(kinds)}"


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "none"


def _assert_refused(text: str, found: Run) -> None:
    assert found.failed, f"it is said to be refused ({text!r}) and ran"
    assert re.search(re.escape(text), " ".join(found.output.split())), _told(f"it is refused without {text!r}", found)


def _told(what: str, found: Run) -> str:
    output = found.output
    begins = output.find("Traceback (most recent call last)")  # before the launcher's own
    shown = output[begins : begins + _END] if begins >= 0 else output[-_END:]
    return f"{what} (all output: {found.folder.parent / 'output.txt'}):\n{shown}"
