"""The methods of transformers' and PEFT's models that are replaced on a prepared model."""

from __future__ import annotations

from torch import nn

from .. import _private
from . import generation, peft, save_pretrained, unfilled_params
from .method_overrides import shadow
from .unwrap import engine_of


def install(model: nn.Module) -> None:
    """Make ``save_pretrained``, ``generate`` and PEFT's methods of `model` and of its parts right for shards. Not collective.

    Models of other origin are left alone, and neither library is imported.
    """
    engine = engine_of(model)
    for module in model.modules():
        unfilled_params.unguard(module)
        shadow(module, "save_pretrained", save_pretrained.save_pretrained, engine)
        if _private.generates(module):
            shadow(module, "generate", generation.generate, engine)
        if _private.takes_adapters(module):
            for name in ("add_adapter", "load_adapter"):
                shadow(module, name, getattr(peft, name), engine)
        if _private.is_tuner(module):
            for name in ("merge_adapter", "unmerge_adapter", "merge_and_unload", "unload"):
                shadow(module, name, peft.on_full_weights, engine)
            for name in ("add_weighted_adapter", "inject_adapter"):
                shadow(module, name, peft.add_adapter, engine)
