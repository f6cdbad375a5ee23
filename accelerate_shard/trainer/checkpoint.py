"""A Trainer's checkpoints of sharded models: the Trainer's own files, with full tensors.

All ranks gather, and the ranks that the Trainer has write them do so. These are functions for :data:`.mixin.STEPS`. Models that
are not sharded are left to the Trainer's own methods.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from torch_shard import ShardTensor
from torch_shard.errors import DivergenceError, MissingRankError, StateDictError
from torch_shard.frontend import (
    agree,
    engine_holding,
    full_state_dict,
    load_optim_state_dict,
    numbered_optim_state_dict,
    param_names_of,
)
from torch_shard.frontend.checkpoint import by_name, each_at_length, refuse_damaged

from .._private import plain_optimizer
from ..accelerator import Accelerator
from ..models import unfilled_params

_SAVING = "saving a model by the Trainer"
_TRAINER_FIRST = (
    "call trainer.train() or trainer.evaluate() before, or trainer.accelerator.prepare_model(trainer.model)"
)
_OPTIMIZER, _SCHEDULER = "optimizer.pt", "scheduler.pt"


# -- written ------------------------------------------------------------------------------------------------------------
def save_weights(
    trainer: Any, own: Callable[..., None], output_dir: str | None = None, state_dict: dict[str, Any] | None = None
) -> None:
    """Write the full model as ``from_pretrained`` reads it, and what goes with it. Collective: call it on all ranks.

    Raises:
        MissingRankError, DivergenceError: only some ranks came, as under ``if trainer.is_world_process_zero():``.
        StateDictError: `state_dict` holds shards.
        SetupError: the model has no values before it is sharded. Nothing has been written.
    """
    # trainer.model may be a part of the sharded model, as merge_and_unload returns one.
    engine = engine_holding(trainer.model)
    if state_dict is not None:
        _refuse_shards(state_dict)
    elif engine is None:
        unfilled_params.refuse(trainer.model, "trainer.save_model()", _TRAINER_FIRST)
    if engine is None or state_dict is not None:
        own(output_dir, state_dict=state_dict)
        return
    writes = bool(trainer.args.should_save)
    target = trainer.args.output_dir if output_dir is None else output_dir
    with all_ranks("trainer.save_model()"):
        each_at_length(engine, _SAVING, lambda: os.makedirs(target, exist_ok=True) if writes else None)
        if hasattr(trainer.model, "save_pretrained"):
            # save_pretrained gathers what it writes: little if that is adapters. The Trainer calls it on ranks that write.
            own_part = (
                functools.partial(own, output_dir)
                if writes
                else functools.partial(trainer.model.save_pretrained, target, is_main_process=False)
            )
            error: Exception | None = None
            try:
                own_part()
            except Exception as problem:  # the other ranks must hear of it
                error = problem
            agree(engine, _SAVING, None, error)
        else:
            state = full_state_dict(engine, trainer.model, not trainer.args.save_on_each_node)
            each_at_length(engine, _SAVING, lambda: own(output_dir, state_dict=state))


def save_optimizer(trainer: Any, own: Callable[[str], None], output_dir: str) -> None:
    """Write ``optimizer.pt``, with full state by number as a plain optimizer has it, and ``scheduler.pt``. Collective."""
    engine = engine_holding(trainer.model)
    if engine is None:
        own(output_dir)
        return
    optimizer = plain_optimizer(trainer.optimizer)
    with all_ranks("saving a Trainer's checkpoint"):
        state = numbered_optim_state_dict(engine, optimizer, not trainer.args.save_on_each_node, trainer.model)

        def write() -> None:
            # The Trainer asks its optimizer for nothing but this.
            before, trainer.optimizer = trainer.optimizer, types.SimpleNamespace(state_dict=lambda: state)
            try:
                own(output_dir)
            finally:
                trainer.optimizer = before

        each_at_length(engine, "Trainer: saving the optimizer", write)


def _refuse_shards(state_dict: dict[str, Any]) -> None:
    sharded = [name for name, value in state_dict.items() if isinstance(value, ShardTensor)]
    if sharded:
        raise StateDictError(
            f"{sharded[0]} and {len(sharded) - 1} more entries of the state dict are shards, not full parameters: call "
            "trainer.save_model() on all ranks, without a state dict of your own."
        )


# -- read ---------------------------------------------------------------------------------------------------------------
def load_weights(trainer: Any, own: Callable[..., None], resume_from_checkpoint: str, model: Any = None) -> None:
    """Load the weights of a checkpoint: into the plain model, or into shards. Collective where the model is sharded, or on meta.

    The Trainer loads before it prepares. A model on meta, whose values come when it is sharded, takes none before.
    """
    if isinstance(trainer.accelerator, Accelerator) and any(p.is_meta for p in trainer.model.parameters()):
        trainer.accelerator.prepare_model(trainer.model)
    own(resume_from_checkpoint, model)


def load_optimizer(trainer: Any, own: Callable[[str | None], None], checkpoint: str | None) -> None:
    """Load ``optimizer.pt`` and ``scheduler.pt``, of any number of ranks or of plain training. Collective.

    The file is mapped, and each rank copies its shards out of it.

    Raises:
        CheckpointError: on all ranks: a file is damaged; nothing was loaded.
        StateDictError: on all ranks, with everything that does not fit; nothing was loaded.
    """
    engine = engine_holding(trainer.model)
    paths = [os.path.join(checkpoint or "", name) for name in (_OPTIMIZER, _SCHEDULER)]
    if checkpoint is None or engine is None or not all(map(os.path.isfile, paths)):
        own(checkpoint)
        return
    optimizer = plain_optimizer(trainer.optimizer)

    def read() -> tuple[Any, Any]:
        # The ranks divide the larger file among them, unless each node has its own.
        refuse_damaged(
            Path(paths[0]), *((0, 1) if trainer.args.save_on_each_node else (engine.rank, engine.world_size))
        )
        refuse_damaged(Path(paths[1]))
        state = torch.load(paths[0], map_location="cpu", mmap=True, weights_only=True)
        with warnings.catch_warnings():
            # torch's warnings about saving and loading schedulers are not meant for the user of a Trainer.
            warnings.simplefilter("ignore")
            schedule = torch.load(paths[1], map_location="cpu", weights_only=True)
        return by_name(optimizer, param_names_of(engine, optimizer, trainer.model), state), schedule

    state, schedule = each_at_length(engine, "Trainer: loading the optimizer", read)
    load_optim_state_dict(engine, optimizer, state, trainer.model)
    trainer.lr_scheduler.load_state_dict(schedule)


# -- together -----------------------------------------------------------------------------------------------------------
@contextlib.contextmanager
def all_ranks(what: str) -> Iterator[None]:
    """Add to errors of missing ranks the advice to call `what` on all ranks."""
    try:
        yield
    except (DivergenceError, MissingRankError) as error:
        remedy = f"{what} is called on all ranks, not under `if trainer.is_world_process_zero():` or the like."
        raise type(error)(f"{error}\n{remedy}") from error
