"""The kinds of optimizers: how their steps work on a sharded model.

There are three kinds, by the exact class. A subclass may do anything, so it is of no kind until it is registered.

- ``"elementwise"``: every element of a parameter is updated from the same element of its gradient and state, and from
  options of the group. The step works on flat plain tensors, one for each unit and parameter group or for several. These are
  torch.optim's SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD, and Lion where torch has it.
- ``"matrix"``: the update of a parameter needs all of it. Each parameter is updated in full, on the rank that owns it. These
  are torch.optim's Muon and Adafactor, transformers' Adafactor, and torchao's Adam and AdamW with state in 8 or 4 bits, which
  they quantise in blocks.
- no kind: the optimizer gets the ShardTensors as they are. Arithmetic element by element, and norms, are right. Anything else
  is an error where it is done, and what the step has changed before stays changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from ..errors import ConfigError

Kind = Literal["elementwise", "matrix"]

_ATTRIBUTE = "_torch_shard_kind"
_ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD", "Lion",
)  # fmt: skip
_MATRIX = ("Muon", "Adafactor")
_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch.optim's classes
# Classes of packages that need not be installed, by module and name.
_BY_NAME: dict[tuple[str, str], Kind] = {
    ("transformers.optimization", "Adafactor"): "matrix",
    ("apex.optimizers.fused_adam", "FusedAdam"): "elementwise",
    ("apex.optimizers.fused_sgd", "FusedSGD"): "elementwise",
    ("apex.optimizers.fused_adagrad", "FusedAdagrad"): "elementwise",
    # Whether they quantise a parameter's state, and in which blocks, depends on its number of elements. torchao 0.18.
    **{
        ("torchao.optim.adam", f"{name}{bits}"): "matrix"
        for name in ("Adam", "AdamW")
        for bits in ("8bit", "4bit", "Fp8")
    },
}


def register(cls: type, kind: Kind) -> type:
    """Declare how an optimizer class of your own steps. Not collective; do it on all ranks, before the first step.

    ``step()`` then finds plain tensors in ``self.param_groups``, with their state in ``self.state``: 1-D pieces of parameters
    (``"elementwise"``), or the full parameters that this rank owns (``"matrix"``). All else of the optimizer is its own,
    and what it writes to a group's options or to its attributes is kept. It must

    - update each parameter from its own ``.grad``, ``self.state[p]`` and the group's options alone, without sums over several
      parameters;
    - for ``"elementwise"``: keep tensors shaped like ``p``, 0-dim tensors and Python values in ``self.state[p]``, and look
      neither at a parameter's shape nor at its number of elements;
    - keep what belongs to a parameter in ``self.state`` only, not under the parameter elsewhere;
    - read ``self.param_groups`` after its closure has run;
    - for ``"matrix"``: go through the groups in one loop, and update a group's parameters within its body. When the loop goes
      on, they are sent back: torch refuses to write to them then, and their values are NaN. One of the user's groups may come
      in several parts, some of them without a parameter, each with the options as they were before the step. Random numbers
      that the step draws differ between the ranks. What it counts in a group it counts whether or not the part has parameters,
      since a rank may own none. What it does to gradients is not sent back, so they must be cleared before
      the next backward.

    With ``"elementwise"`` it may also

    - go through ``self.param_groups`` several times, in nested loops too, and call the closure again after a loop (SAM): the
      closure finds what the loop has done. Parameters that were taken before a closure are out of date after it: go through
      the groups anew. A closure after ``self.param_groups[0]``, without a loop, does not find what was done.
    - count in a group (``group["step"] += 1``) or in itself, once for each step, however many tensors its parameters are;
    - change ``p.grad`` in place, replace it or set it to None, also with ``self.zero_grad()``; the user finds it so after the
      step. Which of these it does must not depend on the gradient's values, because a tensor may stand for several parameters.
    - read Python attributes that the user has given to a parameter (``p.lr_scale``), which is then stepped by itself: many
      such parameters cost time. Attributes that it sets itself are not kept: use ``self.state[p]``.

    With ``"matrix"`` state of any form is kept, at the rank that owns the parameter; ``optimizer.state_dict()`` is that rank's
    part, and ``engine.optim_state_dict(optimizer)`` is all of it. A rank sends about three times its share of the parameters'
    bytes in a step.

    Args:
        cls: the class itself; its subclasses are not registered with it.
        kind: ``"elementwise"`` or ``"matrix"``.

    Returns:
        `cls`, so that it can be used as a decorator with ``functools.partial``.

    Raises:
        ConfigError: not an optimizer class, or another `kind`.
    """
    if not isinstance(cls, type) or not callable(getattr(cls, "step", None)):
        raise ConfigError(f"register: {cls!r} is not an optimizer class with a step() method.")
    if kind not in ("elementwise", "matrix"):
        raise ConfigError(f"register: kind must be 'elementwise' or 'matrix', not {kind!r}.")
    setattr(cls, _ATTRIBUTE, kind)
    return cls


def kind_of(cls: type) -> Kind | None:
    """Return the kind of an optimizer class, or None. Not collective."""
    own: Any = cls.__dict__.get(_ATTRIBUTE)
    if own is not None:
        return own  # type: ignore[no-any-return]
    if is_torchs(cls):
        return "elementwise" if cls.__name__ in _ELEMENTWISE else "matrix" if cls.__name__ in _MATRIX else None
    return _BY_NAME.get((cls.__module__, cls.__qualname__))


def counters_in(state: Iterable[tuple[torch.Tensor, Any]]) -> frozenset[Any]:
    """Return the keys of state that is 0-dim whatever the shape of the parameter.

    Parameters that are not 0-dim show which keys these are. Keys that no such parameter has count if torch.optim's classes have
    them for counters.

    Args:
        state: parameters with their state, by key.
    """
    found = set(_COUNTERS)
    for param, entries in state:
        for key, value in entries.items() if param.dim() and isinstance(entries, Mapping) else ():
            if isinstance(value, torch.Tensor):
                found.discard(key) if value.dim() else found.add(key)
    return frozenset(found)


def is_counter(key: Any, shape: torch.Size, counters: frozenset[Any]) -> bool:
    """Return True if an entry of this key and shape is 0-dim whatever the shape of the parameter.

    Entries of a 0-dim parameter are all 0-dim, so that only the key tells. `counters` is what :func:`counters_in` has found.
    """
    return not shape and key in counters


def is_declared(cls: type) -> bool:
    """Return True if `cls` itself was given to :func:`register`."""
    return _ATTRIBUTE in cls.__dict__


def kind_of_step(cls: type, function: Any) -> Kind | None:
    """Return the kind of `cls`; if it has none, that of `function`, a ``step`` of torch's that it inherits or calls.

    The result is None if neither has a kind.
    """
    own = kind_of(cls)
    if own is not None or function is None:
        return own
    plain = inspect.unwrap(function)
    for base in cls.__mro__:
        if is_torchs(base) and kind_of(base) is not None and inspect.unwrap(base.step) is plain:  # type: ignore[attr-defined]
            same = getattr(cls, "_init_group", None) is getattr(base, "_init_group", None)
            return kind_of(base) if same else None
    return None


def has_linear_work(cls: type) -> bool:
    """Return True if a step of kind ``"matrix"`` makes no matrix products: its time is linear in a parameter's elements."""
    return cls.__name__ == "Adafactor" and kind_of(cls) == "matrix"


def is_torchs(cls: type) -> bool:
    """Return True if `cls` is one of torch.optim's own classes."""
    return getattr(torch.optim, cls.__name__, None) is cls
