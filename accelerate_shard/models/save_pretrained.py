"""``model.save_pretrained`` on a sharded model: full tensors, written by transformers' and PEFT's own code.

Without ``state_dict=`` the call is collective: the tensors are gathered unit by unit on the CPU of the rank that writes, and all
ranks return when the files are there. A rank that calls it alone, while the others do something else, reads the tensors from
them. With full tensors in ``state_dict=``, from ``accelerator.get_state_dict(model)``, it is not
collective. The libraries never see a state dict of shards.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, ShardTensor
from torch_shard.errors import ConfigError, StateDictError
from torch_shard.frontend import agree, all_read, engine_holding, make_full, reading_alone
from torch_shard.frontend.checkpoint import broadcast, each, gather

from .. import _private
from .full_weights import Known, known, known_weights

_COMPILED = "_orig_mod."  # the prefix of names in the state dict of a compiled model


def save_pretrained(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``save_pretrained`` with the tensors of the full model, as they are stored. Collective without ``state_dict=``.

    One rank may call it alone, as under ``if accelerator.is_main_process:``.

    In a hook of ``save_state``, and in the ``save_pretrained`` of a model around it, it is not collective, and the rank that
    runs the hook or the outer call writes alone (see :mod:`.full_weights`).

    The ranks with ``is_main_process=True`` write. If all of them pass that and the same directory, rank 0 writes.

    Args:
        module: a sharded model, or a part of one, with a ``save_pretrained`` of its own. Where that takes no ``state_dict=``, the
            ranks that write hold the full parameters while it runs, too, so that it may compute.
        stock: the module's own ``save_pretrained``, which gets the other arguments.

    Returns:
        What `stock` returns, on a rank that writes.

    Raises:
        MissingRankError: some rank does not call it; nothing has been written.
        StateDictError: ``state_dict=`` holds tensors that are not full, or is empty on the rank that writes.
        CheckpointError: on all ranks: the files can't be written.
        ConfigError: an argument for which the sharded model itself would have to be changed.
    """
    found = known(module)
    if found is not None:
        return _save_known(module, found, _Call(module, stock, args, kwargs))
    engine = engine_holding(module)
    if engine is None:
        return stock(*args, **kwargs)
    call = _Call(module, stock, args, kwargs)
    given = call.state_dict
    prompts = _private.prompt_encoders(module)
    if given is not None and not prompts and not any(isinstance(value, ShardTensor) for value in given.values()):
        return _save_given(module, engine, call, given)
    return _save_together(module, engine, call, prompts)


class _Call:
    """The user's call, with its arguments by name."""

    def __init__(self, module: nn.Module, stock: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.what = f"{type(module).__name__}.save_pretrained"
        self.stock = stock
        signature = inspect.signature(stock)
        bound = signature.bind(*args, **kwargs)
        rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
        self.arguments: dict[str, Any] = dict(bound.arguments)
        self.arguments.update(self.arguments.pop(rest, {}) if rest is not None else {})
        self.positional = [
            self.arguments.pop(p.name) for p in signature.parameters.values() if p.kind is p.POSITIONAL_ONLY
        ]
        self.takes_state = "state_dict" in signature.parameters or _private.is_peft_model(module)
        self.state_dict: Mapping[str, Any] | None = self.arguments.pop("state_dict", None)
        self.is_main = bool(self.arguments.get("is_main_process", True))
        first = self.positional[0] if self.positional else next(iter(bound.arguments.values()), None)
        self.directory = os.path.abspath(first) if isinstance(first, (str, os.PathLike)) else repr(first)
        if self.arguments.get("path_initial_model_for_weight_conversion") is not None:
            raise ConfigError(
                f"{self.what}: path_initial_model_for_weight_conversion loads one more adapter into the model, which can't be "
                "done while it is sharded. Save the adapter as it is, load it into the plain model with "
                "PeftModel.from_pretrained, and convert it there."
            )
        if self.arguments.get("distributed_checkpoint"):
            raise ConfigError(
                f"{self.what}: distributed_checkpoint is for models that transformers has sharded. Leave it out for the full "
                "model; accelerator.save_state(...) writes every rank's shards."
            )

    def write(self, module: nn.Module, found: dict[str, Any]) -> Any:
        """Make the library write the tensors of `found`. Not collective.

        The library may call ``state_dict()`` itself, or ``save_pretrained`` of a part, as SentenceTransformer does.
        """
        state = {"state_dict": found} if self.takes_state else {}
        with known_weights(module, found, is_first=True):
            return self.stock(*self.positional, **self.arguments, **state)


def _save_given(module: nn.Module, engine: Engine, call: _Call, given: Mapping[str, Any]) -> Any:
    """Write what the user has gathered. Not collective."""
    rank = engine.rank
    if not given:
        # accelerator.get_state_dict gives an empty dict on ranks other than 0.
        if not call.is_main or rank != 0:
            return None
        raise StateDictError(f"rank {rank}: {call.what}: state_dict is empty, so that no model would be written.")
    shapes = {name: p.shape for name, p in module.named_parameters(remove_duplicate=False)}
    mismatches = [
        f"{name} is {tuple(value.shape)}, and the parameter {tuple(shapes[name])}"
        for name, value in given.items()
        if name in shapes and isinstance(value, torch.Tensor) and value.shape != shapes[name]
    ]
    if mismatches:
        raise StateDictError(
            f"rank {rank}: {call.what}: state_dict does not hold the full parameters; pass accelerator.get_state_dict(model), "
            "called on all ranks.\n  " + "\n  ".join(mismatches)
        )
    return call.write(module, dict(given))


def _save_known(module: nn.Module, found: Known, call: _Call) -> Any:
    """Write where the full weights are known; the other ranks return. Not collective."""
    if not found.is_first or not call.is_main:
        return None
    own = found.state()
    given = own if call.state_dict is None else dict(call.state_dict)
    # The weights that hooks get are ShardTensors.
    lost = [name for name, value in given.items() if isinstance(value, ShardTensor) and name not in own]
    if lost:
        raise StateDictError(
            f"rank 0: {call.what}: state_dict holds shards, and the model has no entries {', '.join(lost[:3])}. Pass entries of "
            "accelerator.get_state_dict(model)."
        )
    return call.write(module, {k: own[k] if isinstance(v, ShardTensor) else v for k, v in given.items()})


def _save_together(module: nn.Module, engine: Engine, call: _Call, prompts: list[nn.Module]) -> Any:
    what = call.what
    if not all_read(engine, what):
        return _save_alone(module, engine, call, prompts)
    plans = gather(engine, (call.is_main, call.directory), what)
    writers, nonce = broadcast(engine, (_writers(plans or []), secrets.token_hex(8)), what)
    if not writers:
        return None
    here = engine.rank in writers
    # Under prompt learning PEFT saves what the encoder computes.
    with engine.gathered(prompts) if prompts else contextlib.nullcontext():
        found: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        error: Exception | None = None
        try:
            found, wanted = _entries(module, call)
        except Exception as problem:  # the other ranks must hear of it
            error = problem
        if prompts:
            agree(engine, what, None, error)
            wanted = _full_of(wanted)
        else:
            # A Trainer passes a compiled model's state dict on the ranks that write, and nothing on the others. The names that
            # the ranks compare are those of the module itself.
            own = {key.removeprefix(_COMPILED): value for key, value in wanted.items()}
            make_full(engine, own, writers == [0], what, error)
            wanted = {key: own[name] for key in wanted if (name := key.removeprefix(_COMPILED)) in own}
        found.update(wanted)
        # A library with a save of its own may compute, too: SentenceTransformer shows what it has encoded in its model card.
        with contextlib.nullcontext() if call.takes_state else engine.gathered(module, ranks=writers):
            return each(engine, what, lambda: call.write(module, found) if here else None, nonce=nonce)


def _save_alone(module: nn.Module, engine: Engine, call: _Call, prompts: list[nn.Module]) -> Any:
    """Write the model on this rank alone, while the others do something else, as under ``if accelerator.is_main_process:``.

    Not collective.
    """
    if not call.is_main:
        return None
    with reading_alone([engine], call.what), engine.gathered(prompts) if prompts else contextlib.nullcontext():
        found, wanted = _entries(module, call)
        if prompts:
            wanted = _full_of(wanted)
        else:
            make_full(engine, wanted, False, call.what)
        found.update(wanted)
    with contextlib.nullcontext() if call.takes_state else engine.gathered(module):
        return call.write(module, found)


def _full_of(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the sharded entries in full, gathered one by one. Collective, unless this rank reads alone."""
    return {key: value.full_tensor().cpu() for key, value in entries.items() if isinstance(value, ShardTensor)}


def _writers(plans: list[tuple[bool, str]]) -> list[int]:
    asked = [rank for rank, (is_main, _) in enumerate(plans) if is_main]
    same = len({plans[rank][1] for rank in asked}) == 1
    return [0] if len(asked) == len(plans) and same else asked


def _entries(module: nn.Module, call: _Call) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict, and its entries that will be written: few if the model has adapters. Not collective."""
    found = dict(call.state_dict if call.state_dict is not None else module.state_dict())
    adapters = _private.saved_adapters(module, call.arguments)
    if adapters is None:
        return found, dict(found)
    chosen: set[int] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns once more when the files are written
        for name in adapters:
            chosen |= {id(value) for value in _private.adapter_state(module, found, name, call.arguments).values()}
    return found, {key: value for key, value in found.items() if id(value) in chosen}
