"""Real text on every machine, nothing to download: the running Python's own standard library."""

from __future__ import annotations

import functools
import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["StdlibText", "bigram_loss", "bigram_table"]

# Third-party packages, and folders that not every distribution of Python installs.
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}
HELD_OUT = 12  # one file in this many


class StdlibText:
    """The bytes of the standard library's ``*.py`` files, split by file into train and held-out.

    Attributes:
        train: uint8, 1-D.
        held_out: uint8, 1-D; no file of it is in `train`.
        files: number of files read.
    """

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = sorted(
            path.relative_to(root).as_posix()
            for path in root.rglob("*.py")
            if SKIPPED.isdisjoint(path.relative_to(root).parts)
        )
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for name in names:
            # By a hash of the name, so that a file more or less moves no other file's side.
            held_out = zlib.crc32(name.encode()) % HELD_OUT == 0
            parts[held_out].append((root / name).read_bytes() + b"\n")
        train, held = (b"".join(part) for part in parts)
        if min(len(train), len(held)) < 100_000:
            raise RuntimeError(f"only {len(train) + len(held)} bytes of Python source in {root}")
        self.files = len(names)
        self.train = torch.frombuffer(bytearray(train), dtype=torch.uint8)
        self.held_out = torch.frombuffer(bytearray(held), dtype=torch.uint8)

    def batch(self, step: int, rank: int, size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return one rank's training windows and their next bytes, each int64 [size, context].

        Drawn anew for each step and rank, and the same in every run.
        """
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        starts = torch.randint(len(self.train) - context - 1, (size,), generator=generator)
        return _windows(self.train, starts, context)

    def held_out_windows(self, count: int, context: int) -> tuple[Tensor, Tensor]:
        """Return `count` windows spread evenly over the held-out text: int64 [count, context]."""
        last = len(self.held_out) - context - 2
        starts = torch.linspace(0, last, count, dtype=torch.float64).long()
        return _windows(self.held_out, starts, context)

    @functools.cached_property
    def bigram(self) -> Tensor:
        """Log-probabilities [256, 256] of the next byte given one byte, from the training text."""
        return bigram_table(self.train)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def bigram_table(text: Tensor, smoothing: float = 0.1) -> Tensor:
    """Return log P(next byte | byte), float64 [256, 256]; `smoothing` is added to each count."""
    pairs = text[:-1].long() * 256 + text[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + smoothing
    return (counts / counts.sum(1, keepdim=True)).log()


def bigram_loss(table: Tensor, tokens: Tensor, targets: Tensor) -> float:
    """Return the table's mean loss in nats per byte on the windows a model is judged by."""
    return -table[tokens, targets].mean().item()
