"""What a table of programs consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .sources import Own, Source

__all__ = ["ACCELERATE", "TORCHRUN", "Program", "Switch", "Tolerance"]


@dataclass(frozen=True)
class Switch:
    """How a program is started under DDP, and what changes for this package.

    Commands begin behind ``python``. ``{ranks}`` in them is the number of ranks, and the program's path or ``-m name`` follows.

    Attributes:
        text: what a user adds or changes, for the table.
        ddp: the command under DDP.
        ours: the command under this package.
        ddp_arguments: arguments of the program itself that only the DDP run gets.
        our_arguments: the same for this package, such as ``strategy=shard``.
        ddp_stand_ins: files in ``stand_ins`` for the DDP run alone, where a program names a strategy that is not DDP, or where
            DDP can't train it as it is.
    """

    text: str
    ddp: Sequence[str]
    ours: Sequence[str]
    ddp_arguments: Sequence[str] = ()
    our_arguments: Sequence[str] = ()
    ddp_stand_ins: Sequence[str] = ()


# Without --multi_gpu the launcher starts one process on a machine without GPUs; ACCELERATE_USE_CPU tells processes of the CPU.
_LAUNCH = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "{ranks}", "--num_machines", "1",
    "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}")
TORCHRUN = Switch("-m torch_shard", _TORCHRUN, (*_TORCHRUN, "-m", "torch_shard"))
ACCELERATE = Switch("-m accelerate_shard", _LAUNCH, (*_LAUNCH, "-m", "accelerate_shard"))


@dataclass(frozen=True)
class Tolerance:
    """How far numbers may be apart: absolute + relative * |DDP's number|, as for `torch.isclose`.

    Attributes:
        losses: relative and absolute, for the losses of every backward.
        files: relative and absolute, for floating-point numbers in files.
        pixels: how far pixels of saved images may be apart, of 255.
        noise: patterns of entries in files, each with its absolute tolerance: for parameters whose gradient is zero but for
            rounding, which Adam scales up. The bias of attention's keys is one: softmax takes no notice of it.
        reason: why it is not the default.
    """

    losses: tuple[float, float] = (1e-5, 1e-6)
    files: tuple[float, float] = (1e-5, 1e-6)
    pixels: int = 1
    noise: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True)
class Program:
    """One program, how it is run, and what is compared.

    Attributes:
        name: for the table and for ``-k``.
        source: where it is.
        arguments: of its first run. ``{data}`` is the folder that `prepare` has filled.
        switch: how it is started.
        then: arguments of further runs in the same folder, one after the other: to resume, for example.
        prepare: makes data and pretrained files in a folder, once for both. What it puts into ``work`` there is copied to the
            working directory of both runs, and not compared: `load_dataset("owner/name")` and the like look there first.
        beside: files of the program's folder that it expects in its working directory.
        ranks: number of processes.
        stand_ins: names of files in ``stand_ins``.
        environment: variables for both runs.
        imports_from: folders below the working directory from which it imports, before all others. ``OUTSIDE_PACKAGES`` follows.
        tolerance: how far numbers may be apart.
        not_compared: patterns of paths of files, each with the reason why these can't be equal.
        losses: True to compare losses; False for a program without a backward.
        names_folders_by_second: True if each rank names a folder by the time, and means one folder; where the ranks have met
            different seconds, that of rank 0 is compared.
        refused: a piece of the error with which this package refuses it; the DDP run must succeed all the same.
        limit: seconds that one run may take.
    """

    name: str
    source: Source
    arguments: Sequence[str]
    switch: Switch
    then: Sequence[Sequence[str]] = ()
    prepare: Callable[[Path], object] | None = None
    beside: Sequence[str] = ()
    ranks: int = 2
    stand_ins: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    imports_from: Sequence[str] = ()
    tolerance: Tolerance = Tolerance()
    not_compared: Mapping[str, str] = field(default_factory=dict)
    losses: bool = True
    names_folders_by_second: bool = False
    refused: str | None = None
    limit: float = 600

    def __str__(self) -> str:
        return self.name

    @property
    def is_library(self) -> bool:
        """Whether the program is ours, and only the library another's."""
        return isinstance(self.source, Own)
