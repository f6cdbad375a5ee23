"""torch's class ZeroRedundancyOptimizer, its arguments and methods, over an optimizer that the engine steps on shards."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import torch

from ..errors import ConfigError
from ..optim.registry import is_torchs, kind_of, register
from .launch import replace_everywhere

_PUBLIC = ("torch.distributed.optim", "torch.distributed.optim.zero_redundancy_optimizer")


class ZeroRedundancyOptimizer(torch.optim.Optimizer):
    """The optimizer that torch's ZeroRedundancyOptimizer makes on each rank, here one over all parameters. Not collective.

    torch's class gives each rank an optimizer over some of the parameters, and broadcasts what it has stepped. Sharded parameters
    have their optimizer state sharded already, so that the inner optimizer steps alone. An instance is also one of
    `optimizer_class`.

    Args:
        params: all parameters, or groups of them.
        optimizer_class: the class of the inner optimizer.
        process_group, parameters_as_bucket_view: have no effect; the ranks are those of the model.
        overlap_with_ddp: must be False.
        defaults: the arguments of `optimizer_class`.

    Raises:
        ConfigError: `overlap_with_ddp` is True.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            raise ConfigError(
                "ZeroRedundancyOptimizer: overlap_with_ddp=True steps in a hook of DDP's buckets, which a sharded model does not "
                "have. Set it to False, and call step(); engine.step_in_backward(optimizer) steps during backward."
            )
        own: Any = type(self)
        self.__class__ = _joined(own, optimizer_class)
        optimizer_class.__init__(self, params, **defaults)

    @property
    def optim(self) -> torch.optim.Optimizer:
        """The inner optimizer, which is this one."""
        return self

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Do nothing: the state dict of each rank is complete, and one rank alone may save it."""


@functools.cache
def _joined(cls: Any, optimizer_class: Any) -> Any:
    """Return a class with the methods of `cls` and the steps of `optimizer_class`."""
    joined = type(cls.__name__, (cls, optimizer_class), {"__module__": cls.__module__, "__doc__": cls.__doc__})
    kind = kind_of(optimizer_class)
    if kind is not None and not is_torchs(optimizer_class):  # else the kind is that of the step that is inherited
        register(joined, kind)
    return joined


def replace_zero_redundancy_optimizer() -> None:
    """Make torch's ZeroRedundancyOptimizer ours from now on, in the scripts that a runner runs. Not collective."""
    with warnings.catch_warnings():  # torch's own, about torch.jit
        warnings.simplefilter("ignore", DeprecationWarning)
        public = [importlib.import_module(name) for name in _PUBLIC]
    stock = public[0].ZeroRedundancyOptimizer
    # torch's other modules keep torch's class, as they keep torch's DistributedDataParallel.
    replace_everywhere(stock, ZeroRedundancyOptimizer, ("torch", "torch_shard"))
    for module in public:
        module.ZeroRedundancyOptimizer = ZeroRedundancyOptimizer  # type: ignore[attr-defined]
