"""In which modes the rows run: strategies, mixed precision, and offload.

A row that says nothing of strategy or precision runs in each of :data:`MODES`; one that names its own strategy keeps it. Only the
first mode and a few rows of another (``QUICK`` in conftest.py) belong to the ordinary tests.

**Mixed precision** has an exact oracle. The sharded model is stored in float64 and computed with in float32. So is the plain one:
:func:`as_computed` lets its forwards compute with float32 copies of its parameters, by plain torch, with a cast that autograd
sees. Both hold float64 masters, and both compute the same float32 operations; so what the rows compare is compared in float64,
as tightly as without mixed precision, and a master that was rounded, or a gradient that was summed in float32, shows. (Rows in
which float32 sums are rounded in another order are listed in conftest.py, with what else differs.)

**Offload** changes where things are and when the optimizer steps, but no number: the oracle is that of the mode without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from torch_shard import Precision

__all__ = ["MODES", "STRATEGIES", "Mode", "as_computed", "mixed"]

STRATEGIES = ("full_shard", "shard_grad_op", "shard_optim", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
HYBRID = {"shard_size": 2}
"""Rows of two ranks run on four under the hybrid strategies: two copies."""
MIXED = ("full_shard", "no_shard")
"""Strategies that rows run under in mixed precision: where units are gathered and cast, and where they are cast only."""

OFFLOADED = (("full_shard", False), ("full_shard", True))
"""Strategies that rows run under with offload, and whether in mixed precision: then what crosses to the device is a cast copy."""

STORED, COMPUTED = torch.float64, torch.float32
KEPT: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._NormBase,)  # which have buffers in float64
PRECISION = Precision(param_dtype=COMPUTED, keep=KEPT)


@dataclass(frozen=True)
class Mode:
    """What a row gets that it does not name itself."""

    strategy: str
    mixed: bool = False
    offload: bool = False
    rounded: bool = False  # results may differ in the last bits of the computation; see conftest.py

    @property
    def is_usual(self) -> bool:
        return self == MODES[0]

    @property
    def is_hybrid(self) -> bool:
        return self.strategy.startswith("hybrid")

    def __str__(self) -> str:
        return self.strategy + "-mixed" * self.mixed + "-offload" * self.offload

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """In a rank: while the body of a test runs."""
        global _current
        assert not self.is_hybrid or dist.get_world_size() == 4  # see conftest.py
        shard = torch_shard.shard

        @functools.wraps(shard)
        def in_mode(model: nn.Module, config: Any = None, *, mesh: Any = None, **overrides: Any) -> Any:
            if config is None:
                if self.is_hybrid and "strategy" not in overrides:
                    overrides = {**HYBRID, **overrides}
                overrides.setdefault("strategy", self.strategy)
                if self.mixed:
                    overrides.setdefault("precision", PRECISION)
                if self.offload:
                    overrides.setdefault("offload", "cpu")
                global _replicates
                _replicates = overrides["strategy"] == "no_shard"
            return shard(model, config, mesh=mesh, **overrides)

        _current = self
        try:
            with mock.patch.object(torch_shard, "shard", in_mode):
                yield
        finally:
            _current = MODES[0]


MODES = (
    # "shard_optim" is "shard_grad_op" that reshards late: tests/optim and the property tests have it.
    # "hybrid_shard_zero2" gathers as "shard_grad_op" and reduces as "hybrid_shard": tests/hybrid and the property tests have it.
    *(Mode(strategy) for strategy in STRATEGIES if strategy not in ("shard_optim", "hybrid_shard_zero2")),
    *(Mode(strategy, mixed=True) for strategy in MIXED),
    *(Mode(strategy, mixed, offload=True) for strategy, mixed in OFFLOADED),
)
_current = MODES[0]
_replicates = False  # the latest model


def sums_in_low_precision() -> bool:
    """Whether the backend sums gradients of the test that runs, which are replicated."""
    return _current.mixed and _replicates


def tolerance() -> tuple[float, float]:
    """Relative and absolute."""
    return (1e-5, 5e-7) if _current.mixed and (_current.rounded or _replicates) else (1e-9, 1e-10)


def mixed() -> bool:
    """Whether the test that runs is in mixed precision."""
    return _current.mixed


def as_computed(plain: Any) -> Any:
    """`plain`, which under mixed precision computes as a sharded model does; otherwise as it is."""
    if mixed() and any(p.dtype is STORED for p in plain.parameters()):
        _LowCopies(plain)
    return plain


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def needs(v: Any) -> bool:
        return type(v) is torch.Tensor and v.is_floating_point() and v.dtype != dtype

    if not any(map(needs, torch.utils._pytree.tree_leaves(value))):
        return value  # itself: it may be there for the forward to fill
    return torch.utils._pytree.tree_map(lambda v: v.to(dtype) if needs(v) else v, value)


class _LowCopies:
    """On a plain model, and copied with it: the outermost forward in it puts low-precision copies in the parameters' places."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self.depth = 0
        self.places: list[tuple[dict[str, Any], str, Any, torch.Tensor]] = []
        self.flat_weights: list[tuple[nn.RNNBase, Any]] = []
        self.given: list[torch.dtype | None] = []
        for module in root.modules():
            module.register_forward_pre_hook(self.begin, with_kwargs=True, prepend=True)
            module.register_forward_hook(self.end, always_call=True)

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.depth == 0:
            self.install()
        self.depth += 1
        kept = isinstance(module, KEPT)
        if kept:
            self.given.append(next((a.dtype for a in args if isinstance(a, torch.Tensor)), None))
        dtype = STORED if kept else COMPUTED
        return _cast(args, dtype), _cast(kwargs, dtype)

    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.depth -= 1
        if self.depth == 0:
            self.put_back()
        if isinstance(module, KEPT):
            dtype = self.given.pop()
            return output if output is None or dtype is None else _cast(output, dtype)
        return None

    def install(self) -> None:
        copies: dict[int, torch.Tensor] = {}
        for module in self.root.modules():
            if isinstance(module, KEPT):
                continue
            for name, p in module._parameters.items():
                if p is None or p.dtype is not STORED:
                    continue
                if id(p) not in copies:
                    copies[id(p)] = p.to(COMPUTED)
                low = copies[id(p)]
                self.places.append((module._parameters, name, p, low))
                module._parameters[name] = low  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                self.flat_weights.append((module, module._flat_weights))
                module._flat_weights = [module._parameters[n] for n in module._flat_weights_names]  # type: ignore[misc]

    def put_back(self) -> None:
        places, self.places = self.places, []
        for module, weights in self.flat_weights:
            module._flat_weights = weights
        self.flat_weights = []
        for parameters, name, p, low in places:
            if parameters.get(name) is low:
                parameters[name] = p
            with torch.no_grad():
                edited = low.detach() != p.detach().to(COMPUTED)  # in the forward; through `.data`, perhaps
                if not torch.is_inference_mode_enabled() and edited.any():
                    p.copy_(torch.where(edited, low.detach().to(STORED), p))
