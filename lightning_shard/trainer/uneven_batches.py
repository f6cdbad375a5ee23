"""Ranks with different numbers of batches to evaluate, as ``predict`` has them whenever the samples do not divide evenly.

Under DDP they work, since a forward without gradients sends nothing. Here it gathers parameters, from all ranks together.
So where the numbers differ each rank holds the whole parameters from its first batch to its last, and goes alone meanwhile.

Where these don't fit in memory, or where a rank can't know how many batches it has before it has read them, each forward says
whether its batch is this rank's last. The engine compares that with what the ranks compare anyway, and so the last batch of
the rank that has fewest raises an error on all, rather than leaving the others to wait.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import torch_shard
from torch_shard import Engine
from torch_shard.frontend import agree, in_batch, is_solo
from torch_shard.log import logger

from .._private import MixinBase, is_last_to_evaluate
from .memory import fits_on_every_rank

__all__ = ["EvaluationMixin"]


class EvaluationMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that runs the steps of ``validate``, ``test`` and ``predict``."""

    _answer_requeue: Callable[[], None]
    _told_to_end: Callable[[], bool]
    _begins: bool = False  # no batch of this loop has been run
    _whole: contextlib.ExitStack | None = None  # while this rank goes alone

    def on_validation_start(self) -> None:
        """Before the first batch."""
        self._begins = True
        super().on_validation_start()

    def on_test_start(self) -> None:
        """Before the first batch."""
        self._begins = True
        super().on_test_start()

    def on_predict_start(self) -> None:
        """Before the first batch."""
        self._begins = True
        super().on_predict_start()

    def on_validation_end(self) -> None:
        """After the last batch, and what the callbacks do then."""
        self._leave_whole()
        super().on_validation_end()

    def on_test_end(self) -> None:
        """After the last batch, and what the callbacks do then."""
        self._leave_whole()
        super().on_test_end()

    def on_predict_end(self) -> None:
        """After the last batch, and what the callbacks do then."""
        self._leave_whole()
        super().on_predict_end()

    @contextlib.contextmanager
    def _evaluating(self, step: str) -> Iterator[None]:
        """Around one step. Collective, but for ranks that go alone."""
        module = self.lightning_module
        engine = torch_shard.engine_of(module)
        if self._whole is None:
            self._answer_requeue()
        if engine is None or engine.world_size == 1:
            yield
            return
        if self._begins:
            # Here and not in a start hook: callbacks that swap weights there must find slices.
            self._begins = False
            self._told_to_end()
            self._hold_whole_if_uneven(engine, step)
        last = is_last_to_evaluate(module.trainer)
        which = "the last batch" if last else "a batch before the last one"
        with in_batch(engine, "" if self._whole is not None else f"{which} of its {step} loop"):
            yield
        if last:
            self._leave_whole()

    def _hold_whole_if_uneven(self, engine: Engine, step: str) -> None:
        """Collective. A rank without any batch does something else now, which the engine says on all ranks."""
        if is_solo(engine):  # the user has gathered on some ranks only
            return
        agree(engine, f"the first batch of the {step} loop")
        trainer = self.lightning_module.trainer
        # Of each dataloader: where one ends the Trainer reduces what was logged.
        numbers = [float(number) for number in _numbers_of_batches(trainer)]
        key = zlib.crc32(repr(numbers).encode())
        bounds = torch.tensor([key, -key], dtype=torch.float64, device="cpu").to(engine.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        if bounds.sum().item() == 0 or not fits_on_every_rank(engine, (), self.num_processes, self.reduce):
            return
        if trainer.is_global_zero:
            logger.info(
                "%s: ranks have different numbers of batches (this one %s), so each holds the whole parameters meanwhile",
                step,
                " + ".join(f"{number:g}" for number in numbers),
            )
        self._whole = contextlib.ExitStack()
        self._whole.enter_context(engine.gathered())

    def _leave_whole(self) -> None:
        """Not collective."""
        whole, self._whole = self._whole, None
        if whole is not None:
            whole.close()


def _numbers_of_batches(trainer: Any) -> Iterable[float]:
    """Of each dataloader on this rank; inf where it can't be known."""
    if trainer.sanity_checking:
        numbers = trainer.num_sanity_val_batches
    elif trainer.predicting:
        numbers = trainer.num_predict_batches
    else:
        numbers = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    return numbers if isinstance(numbers, Iterable) else [numbers]
