"""Full weights for code that runs on the main process alone: hooks of ``save_state``, and what ``save_pretrained`` calls.

Under DDP ``if accelerator.is_main_process: unwrap(model).save_pretrained(...)`` is right. With sharded models that rank has only
its shards, and the other ranks do not take part. So all models are gathered before hooks run. While they run, ``state_dict()`` of
a model and of its parts, ``accelerator.get_state_dict``, ``save_model`` and ``save_pretrained`` use the full weights on rank 0
and are not collective. On the other ranks they return nothing and write nothing. The same holds on a rank that writes while the
``save_pretrained`` of a model calls that of a part.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torch_shard import Engine
from torch_shard.errors import StateDictError

from .. import _private
from .method_overrides import Shadow


class Known(NamedTuple):
    """What is known of a module while hooks run.

    Attributes:
        weights: the full state dict of the sharded model that it is, or is a part of; empty but on rank 0.
        path: the module's name in that model, with a dot behind it; empty for the model itself.
        is_first: True on rank 0.
    """

    weights: Mapping[str, torch.Tensor]
    path: str
    is_first: bool

    def state(self) -> dict[str, Any]:
        """Return a new state dict of the module, with full tensors on the CPU; it is empty except on rank 0."""
        length = len(self.path)
        found: Any = OrderedDict((k[length:], v) for k, v in self.weights.items() if k.startswith(self.path))
        found._metadata = OrderedDict()
        for key, value in getattr(self.weights, "_metadata", {}).items():
            if f"{key}.".startswith(self.path):
                found._metadata[key[length:]] = value
        state: dict[str, Any] = found
        return state


_known: dict[int, Known] = {}  # by id of modules that the context manager below keeps alive


def known(module: nn.Module) -> Known | None:
    """Return what is known of a module while hooks run; None outside of them, or if it is not sharded. Not collective."""
    return _known.get(id(module))


@contextlib.contextmanager
def full_weights(
    models: Sequence[nn.Module], engines: Sequence[Engine | None], is_first: bool
) -> Iterator[list[dict[str, Any] | None]]:
    """Gather the full weights for the save hooks, which run inside. Collective.

    The CPU of rank 0 holds all sharded models in full until the end; the other ranks no more than two units at a time.

    Args:
        models: the models that the hooks get, without the wrappers of ``torch.compile``.
        engines: the models' engines; None for a model that is not sharded.
        is_first: True on rank 0.

    Yields:
        Full state dicts by number, which may be changed; empty but on rank 0, None for a model that is not sharded.
    """
    with contextlib.ExitStack() as stack:
        full_states = [
            None if engine is None else engine.state_dict(rank0_only=True, offload_to_cpu=True) for engine in engines
        ]
        for model, engine, full in zip(models, engines, full_states, strict=True):
            if engine is None or full is None:
                continue
            prompts = _private.prompt_encoders(model)
            if prompts:  # PEFT saves their output
                stack.enter_context(engine.gathered(prompts))
            stack.enter_context(known_weights(model, full, is_first))
        yield [None if full is None else Known(full, "", is_first).state() for full in full_states]


@contextlib.contextmanager
def known_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], is_first: bool) -> Iterator[None]:
    """Make the weights of a model and of its parts known inside, also to their ``state_dict()`` where `is_first`. Not collective.

    Args:
        model: a sharded model, or a part of one.
        weights: its full state dict; empty unless `is_first`.
        is_first: True on a rank that writes.
    """
    modules = [(name, module) for name, module in model.named_modules() if id(module) not in _known]
    before = [module.__dict__.get("state_dict") for _, module in modules] if is_first else []
    try:
        for name, module in modules:
            _known[id(module)] = Known(weights, f"{name}." if name else "", is_first)
            if is_first:
                own = module.__dict__.get("state_dict")
                module.__dict__["state_dict"] = Shadow(module, "state_dict", _state_dict, own)
        yield
    finally:
        for _, module in modules:
            _known.pop(id(module), None)
        for (_, module), own in zip(modules, before, strict=False):
            if own is None:
                module.__dict__.pop("state_dict", None)
            else:
                module.__dict__["state_dict"] = own


def _state_dict(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return ``Module.state_dict`` with the tensors of the full model, detached. Not collective."""
    found = known(module)
    if found is None:  # a copy that a hook has made
        return stock(*args, **kwargs)
    given: dict[str, Any] = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    destination, prefix = given.get("destination"), given.get("prefix", "")
    own: Any = found.state()
    if not own and next(module.parameters(), None) is not None:
        raise StateDictError(
            f"state_dict() of the part {found.path[:-1]!r} of a sharded model: the model's own state dict has no entries of that "
            "name. In a hook of save_state ask the full model: accelerator.get_state_dict(model)."
        )
    target: Any = OrderedDict() if destination is None else destination
    if destination is None:
        target._metadata = OrderedDict()
    for name, value in own.items():
        target[prefix + name] = value
    if hasattr(target, "_metadata"):
        for name, value in own._metadata.items():
            target._metadata[f"{prefix}{name}" if name else prefix[:-1]] = value
    return target
