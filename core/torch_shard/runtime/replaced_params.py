"""Detection of parameters that were added or replaced after sharding, before the next forward.

Such a parameter would silently train on each rank by itself. torch calls global hooks when a parameter or a submodule is
registered anywhere. The hook here only sets a flag, and the next forward then looks through the model once.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules import module as torch_module

from ..errors import ReplacedParameterError
from ..shard_tensor.tensor import ShardTensor
from ..unit.unit import unit_of
from ..utils.autograd_private import inside_functional_call
from ..utils.patterns import without_wrappers

if TYPE_CHECKING:
    from .runtime import Runtime


class Registrations:
    """Notes, for one runtime, whether anything was registered since :meth:`check` last looked through the model."""

    def __init__(self) -> None:
        self.changed = False
        self.root: weakref.ref[nn.Module] | None = None
        self.ignored: frozenset[str] = frozenset()
        reference = weakref.ref(self)

        def registered(module: nn.Module, name: str, value: Any) -> None:
            watcher = reference()
            if watcher is not None:
                watcher.changed = True

        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            # torch keeps these hooks for all modules of the process; they must not outlive this object.
            weakref.finalize(self, register(registered).remove)

    def check(self, runtime: Runtime) -> None:
        """Raise if the model holds a parameter that `runtime` does not know. Not collective.

        Args:
            runtime: the runtime whose units must hold the parameters.

        Raises:
            ReplacedParameterError: names the parameter.
        """
        root = self.root() if self.root is not None else None
        if root is None:
            return
        # Modules may hold unsharded parameters at this moment.
        known = {id(p) for flat in runtime.flats for p in flat.unsharded_params}
        ignored = {without_wrappers(name) for name in self.ignored}
        for name, p in root.named_parameters():
            if isinstance(p, ShardTensor):
                unit = unit_of(p)
                if unit is not None and unit.runtime is runtime:
                    continue
            elif id(p) in known or without_wrappers(name) in ignored:
                continue
            if inside_functional_call():  # which puts the caller's own parameters into the modules
                return
            raise ReplacedParameterError(
                f"rank {runtime.collectives.world_rank}: parameter {name} was added or replaced after the model was sharded; "
                "it would not be trained on all ranks alike. Change the model before shard(), or close() the engine, change "
                "it and shard again."
            )
        self.changed = False
