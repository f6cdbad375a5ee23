"""The strategies that take the place of Lightning's own: ours, with the attributes of the others that programs use.

A program may have code for one strategy alone, and ask which one it has. ``isinstance(strategy, DDPStrategy)`` is true of these,
whatever the program has named: that code runs right here, since a sharded model behaves as a replicated one. It is false for
FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy: behind that stands code for parameters that are this rank's shard, for
DTensors, or for an engine that clips by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from torch_shard import ShardConfig
from torch_shard.frontend import compress_gradients

from .._private import MixinBase
from ._private import keep_ddp_kwargs, set_device_mesh
from .from_model_parallel import Noted, noting
from .translation import Translation


class StandIn(MixinBase):  # type: ignore[misc]
    """The part of a stand-in that is the same for the Trainer and for Fabric."""

    _compress: torch.dtype | None = None
    _parallelize: Any = None
    _device_mesh: Any = None
    _has_mesh: bool = False
    _noted: Noted | None = None

    def take_over(self, translation: Translation) -> None:
        """Keep the parts of a translation that are no settings of ours. Not collective."""
        keep_ddp_kwargs(self, translation.ddp_kwargs)
        self._compress, self._parallelize = translation.compress, translation.parallelize
        self._has_mesh = translation.has_mesh

    @property
    def device_mesh(self) -> Any:
        """The ranks as ModelParallelStrategy has them, with the dimensions ``"data_parallel"`` and ``"tensor_parallel"``.

        Raises:
            AttributeError: the program's strategy was another one, or there are no processes yet.
        """
        if self._device_mesh is None:
            raise AttributeError(
                "device_mesh: this strategy has no device mesh, or its process group does not exist yet."
            )
        return self._device_mesh

    def _join_group(self) -> None:
        super()._join_group()
        if self._has_mesh:
            from torch.distributed.device_mesh import init_device_mesh

            names = ("data_parallel", "tensor_parallel")
            self._device_mesh = init_device_mesh(self.root_device.type, (self.world_size, 1), mesh_dim_names=names)

    def _engine_config(self, plugin: Any, module: nn.Module) -> ShardConfig:
        config: ShardConfig = super()._engine_config(plugin, module)
        noted = {} if self._noted is None else self._noted.config(config, self.world_size)
        # Settings of the launch count for more. What they ignore is among the parameters to ignore already.
        noted = {
            name: value
            for name, value in noted.items()
            if name == "ignore" or getattr(config, name) == getattr(ShardConfig, name)
        }
        return dataclasses.replace(config, **noted) if noted else config


class TrainerStandInMixin(StandIn):
    """The part of the Trainer's stand-in that the strategy does not have by itself."""

    def setup_environment(self) -> None:
        """Choose the device, join the process group, and give the module its mesh."""
        super().setup_environment()
        if self._device_mesh is not None:
            set_device_mesh(self.lightning_module, self._device_mesh)

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Note what ``configure_model`` gives to ``fully_shard``, for a program with ModelParallelStrategy."""
        with super().model_sharded_context():
            if not self._has_mesh:
                yield
                return
            noted, earlier = Noted(), self._noted
            with noting(noted):
                yield
            # A program divides its model once; a later run of it (fit, then test) makes no calls.
            if noted.calls or earlier is None or not earlier.is_about(self.lightning_module):
                self._noted = noted

    def _shard(self, config: ShardConfig, fitting: bool) -> None:
        super()._shard(config, fitting)
        # Lightning calls DDP's hooks on GPUs only.
        if self._compress is not None and self.root_device.type == "cuda":
            compress_gradients(self.engine, self._compress)


class FabricStandInMixin(StandIn):
    """The part of Fabric's stand-in that the strategy does not have by itself."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module in place, by ModelParallelStrategy's function if there is one, and wrap it. Collective."""
        if self._parallelize is not None:
            self._noted = Noted()
            with noting(self._noted):
                module = self._parallelize(module, self.device_mesh)
        found: nn.Module = super().setup_module(module)
        return found
