"""Accelerators, stock ones and ours, and Accelerate's global state reset around them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import accelerate_shard
from accelerate_shard.models import unwrap
from torch_shard import Engine

STOCK = accelerate.Accelerator
OURS = accelerate_shard.Accelerator
BOTH = [STOCK, OURS]


def reset() -> None:
    """Forget Accelerate's singletons, as a new process would. The process group stays. Not collective."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()


@contextlib.contextmanager
def clean_state() -> Iterator[None]:
    """Inside, Accelerate is as in a new process; afterwards too, with the environment, which it writes to, as before."""
    before = dict(os.environ)
    threads = torch.get_num_threads()
    reset()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(pin_memory|lr_scheduler|OMP_NUM_THREADS).*")
            yield
    finally:
        reset()
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(threads)


@contextlib.contextmanager
def accelerator(kind: type[accelerate.Accelerator] = OURS, /, **options: Any) -> Iterator[Any]:
    """An Accelerator of class `kind` on the CPU, one process of a MULTI_CPU run where there are several ranks.

    Accelerate's state is reset before and after. `options` are those of the class; ``shard_plugin`` is dropped for the stock one.
    """
    with clean_state():
        if kind is STOCK:
            options.pop("shard_plugin", None)
        yield kind(cpu=True, **options)  # not end_training() afterwards, which ends the process group too


def engine_of(model: nn.Module) -> Engine:
    """The engine of a prepared model."""
    engine = unwrap.engine_of(model)
    assert engine is not None, "the model is not sharded"
    return engine
