"""What a case is, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .ranks import Ranks
from .results import Result

# Files in the folder that a launch has of its own: what is to be done, each rank's notes, and how the ranks have ended.
JOB, NOTES, EXIT = "job.json", "notes", "exit.txt"


@dataclass(frozen=True)
class Setting:
    """The setting that decides which cases there are, and how large they are. It goes from the parent to the ranks as JSON.

    Attributes:
        kind: the devices, ``"cpu"`` or ``"cuda"``.
        ranks: the number of ranks.
        quick: whether models are small, and rounds are few.
        peak_tflops: the user's number for a device's peak, in TFLOP/s.
        no_sanitizer: why torch's CUDA sanitizer can't be used here; empty if it can be.
        shares: whether several ranks use one GPU.
    """

    kind: str
    ranks: int
    quick: bool = False
    peak_tflops: float | None = None
    no_sanitizer: str = ""
    shares: bool = False

    @property
    def untimed(self) -> str:
        """The reason why step times would say nothing; empty if there is none."""
        return "ranks share a GPU, so that times say nothing" if self.shares else ""


@dataclass(frozen=True)
class Context:
    """The context of a case: the ranks, the setting, and a folder that the ranks share."""

    ranks: Ranks
    setting: Setting
    folder: Path


@dataclass(frozen=True)
class Case:
    """One case of a part.

    Attributes:
        part: the part.
        name: the name, unique within the part; its results have this name, or names that begin with it.
        run: the function that runs it on all ranks. The results of rank 0 count.
        skip: why it is not run; empty if it is.
        sanitized: whether it runs under torch's CUDA sanitizer, in ranks of its own.
    """

    part: str
    name: str
    run: Callable[[Context, Case], list[Result]]
    skip: str = ""
    sanitized: bool = False
