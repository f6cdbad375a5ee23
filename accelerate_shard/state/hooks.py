"""The users' hooks of ``save_state`` and ``load_state``, which may keep models and weights from being saved or loaded.

Hooks run on every rank, as under DDP. Scripts often change the list of weights on the main process only, because only that
process writes under DDP. So the list that rank 0's hooks leave is what counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_shard.errors import StateDictError
from torch_shard.frontend import WithMetadata

from .prepared import Ranks


class Left(NamedTuple):
    """The state of one model that hooks have left to be saved.

    Attributes:
        number: the model's number; None for a state that a hook has made.
        state: this rank's state dict of the model.
    """

    number: int | None
    state: dict[str, Any]


def after_save_hooks(
    accelerator: Any, ranks: Ranks, weights: Sequence[Mapping[str, Any]], folder: Path, everywhere: bool
) -> list[Left]:
    """Call the save hooks, and find out what is left to be saved. Collective.

    Args:
        accelerator: its hooks get its models, a list of the weights, and `folder`.
        ranks: the ranks of the operation.
        weights: the models' state dicts.
        folder: the folder to which the checkpoint is being written.
        everywhere: all ranks write, so that all must have what rank 0 has; else rank 0 writes alone.

    Raises:
        StateDictError: on all ranks; a rank lacks an entry that rank 0 has.
    """
    given = list(weights)
    number_of = {id(state): number for number, state in enumerate(given)}
    left = list(given)

    def call() -> list[tuple[int | None, list[str]]]:
        for hook in list(accelerator._save_model_state_pre_hook.values()):
            hook(accelerator._models, left, str(folder))
        return [(number_of.get(id(state)), list(state)) for state in left]

    of_first = ranks.broadcast(ranks.each(call))

    def follow() -> list[Left]:
        found = []
        for position, (number, wanted) in enumerate(of_first):
            if number is not None:
                # If rank 0 has kept a dict as it was, changes of this rank's own hooks don't count.
                own = given[number] if set(wanted) <= set(given[number]) else {}
            else:
                own = left[position] if position < len(left) and id(left[position]) not in number_of else {}
            missing = [name for name in wanted if name not in own]
            if missing and everywhere:
                raise StateDictError(
                    f"rank {ranks.rank}: a hook of save_state has left other weights on rank 0 than here (missing: "
                    f"{', '.join(missing[:3])}). In the sharded form every rank writes: the hook must change the entries of "
                    "weights alike on all ranks. Taking full models away (weights.pop()) on the main process is enough."
                )
            kept = WithMetadata((name, own[name]) for name in wanted if name in own)
            if hasattr(own, "_metadata"):  # versions of the modules' own formats
                kept._metadata = own._metadata
            found.append(Left(number, kept))
        return found

    return ranks.each(follow)


def after_load_hooks(accelerator: Any, ranks: Ranks, folder: str) -> list[int]:
    """Call the load hooks, and find out which models are left to be loaded, by number. Collective.

    Args:
        accelerator: its hooks get its models and `folder`.
        ranks: the ranks of the operation.
        folder: the checkpoint's folder, by the name that the program has given, which a hook may write down.

    Raises:
        DivergenceError: the hooks have left different models on the ranks.
    """

    def call() -> list[int]:
        left = list(accelerator._models)
        for hook in list(accelerator._load_model_state_pre_hook.values()):
            hook(left, folder)
        numbers = {id(model): number for number, model in enumerate(accelerator._models)}
        return [numbers[id(model)] for model in left if id(model) in numbers]

    return ranks.each(call, key=lambda left: left)
