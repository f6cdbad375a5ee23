"""Modules among the hyperparameters, which are the very modules that are sharded.

``save_hyperparameters()`` keeps every argument of ``__init__``, also a network that is given to the LightningModule. Under DDP
the checkpoint holds such a network in full, in the memory of the state dict. A single file holds it so here, too. A sharded
checkpoint never has full values in one place, and is loaded into a module that exists. It leaves the network out, as Lightning
leaves out what it can't pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from torch_shard import Engine, ShardTensor
from torch_shard.activation_checkpointing import keep_activations
from torch_shard.frontend import plain_copy


def with_plain_modules(
    engine: Engine, checkpoint: dict[str, Any], key: str, values: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Return a checkpoint in which no hyperparameter is a sharded module. Not collective.

    Args:
        engine: the model's engine.
        checkpoint: the Trainer's dict.
        key: the key under which it has the hyperparameters.
        values: full tensors by the model's names, which plain copies of the modules hold. A module whose tensors are not among
            them is left out with a warning.
    """
    saved = checkpoint.get(key)
    if not isinstance(saved, dict):
        return checkpoint
    kept = {}
    for name, value in saved.items():
        if isinstance(value, nn.Module) and any(isinstance(p, ShardTensor) for p in value.parameters()):
            try:
                value = plain_copy(engine, value, values)
            except KeyError:
                rank_zero_warn(
                    f"Attribute {name!r} removed from hparams because it is a sharded module, and the checkpoint does not have "
                    f"its full values in one place; give it to load_from_checkpoint({name}=...). You can suppress this "
                    f"warning by setting `self.save_hyperparameters(ignore=[{name!r}])`."
                )
                continue
            keep_activations(value)
        kept[name] = value
    return {**checkpoint, key: kept}
