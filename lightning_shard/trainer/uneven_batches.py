"""Evaluation on ranks with different numbers of batches, as ``predict`` has them whenever the samples do not divide evenly.

Under DDP that works, since a forward without gradients sends nothing. Here a forward gathers parameters from all ranks. So if the
numbers differ, each rank holds the full parameters from its first batch to its last, and needs no other rank meanwhile.

If full parameters don't fit in memory, or a rank can't know how many batches it has before it has read them, each forward says
whether its batch is this rank's last. The engine compares that between the ranks with what they compare anyway. Where the answers
differ, each rank reads the model alone, and so does one that has more batches than the others from there on. Where ranks may not
read alone (``ShardConfig(alone="error")``), all of them raise an error instead.
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


class EvaluationMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that runs the steps of ``validate``, ``test`` and ``predict``."""

    _answer_requeue: Callable[[], None]
    _should_end: Callable[[], bool]
    _begins: bool = False  # no batch of this loop has run
    _full: contextlib.ExitStack | None = None  # open while this rank holds full parameters

    def on_validation_start(self) -> None:
        """Note that the first batch comes."""
        self._begins = True

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self) -> None:
        """Release full parameters after the last batch and its callbacks."""
        self._release_full()

    on_test_end = on_predict_end = on_validation_end

    @contextlib.contextmanager
    def _evaluating(self, step: str) -> Iterator[None]:
        """Run one step inside. Collective, unless this rank holds full parameters."""
        module = self.lightning_module
        engine = torch_shard.engine_of(module)
        if self._full is None:
            self._answer_requeue()
        if engine is None or engine.world_size == 1:
            yield
            return
        if self._begins:
            # Not in a start hook: callbacks that swap weights there must find shards.
            self._begins = False
            self._should_end()
            self._gather_if_uneven(engine, step)
        last = is_last_to_evaluate(module.trainer)
        which = "the last batch" if last else "a batch before the last one"
        with in_batch(engine, "" if self._full is not None else f"{which} of its {step} loop"):
            yield
        if last:
            self._release_full()

    def _gather_if_uneven(self, engine: Engine, step: str) -> None:
        """Gather full parameters if the ranks have different numbers of batches and all can hold them. Collective.

        A rank without any batch is in another operation now, which is a DivergenceError on all ranks.
        """
        if is_solo(engine):  # the user has gathered on some ranks only
            return
        agree(engine, f"the first batch of the {step} loop")
        trainer = self.lightning_module.trainer
        # This is done for each dataloader, since the Trainer reduces what was logged where one ends.
        numbers = [float(number) for number in _numbers_of_batches(trainer)]
        key = zlib.crc32(repr(numbers).encode())
        bounds = torch.tensor([key, -key], dtype=torch.float64, device="cpu").to(engine.device)
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        if bounds.sum().item() == 0 or not fits_on_every_rank(self):
            return
        if trainer.is_global_zero:
            logger.info(
                "%s: ranks have different numbers of batches (this one %s), so each holds the full parameters meanwhile",
                step,
                " + ".join(f"{number:g}" for number in numbers),
            )
        self._full = contextlib.ExitStack()
        self._full.enter_context(engine.gathered())

    def _release_full(self) -> None:
        """Release full parameters. Not collective."""
        full, self._full = self._full, None
        if full is not None:
            full.close()


def _numbers_of_batches(trainer: Any) -> Iterable[float]:
    """Return the number of batches of each dataloader on this rank; inf if it can't be known."""
    if trainer.sanity_checking:
        numbers = trainer.num_sanity_val_batches
    elif trainer.predicting:
        numbers = trainer.num_predict_batches
    else:
        numbers = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
    return numbers if isinstance(numbers, Iterable) else [numbers]
