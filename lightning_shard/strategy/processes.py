"""The processes of a run: how they are started, which rank each one is, and how they communicate."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .._private import MixinBase, Private
from .environment import check_devices, check_ranks
from .settings import StrategySettings


class ProcessesMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that knows processes and their group, and nothing of what they train."""

    _private: Private
    _launchers: tuple[Any, Any]  # for popen; for the start methods of multiprocessing
    _num_nodes: int
    _process_group_backend: str | None
    _settings: StrategySettings

    # -- which rank this is -------------------------------------------------------------------------------------------
    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """The number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """True. The Trainer reads this from unknown strategies before it shards a sampler or reduces a log."""
        return True

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments that the Trainer gives to its DistributedSampler."""
        # The base class counts the devices of this node only.
        return {"num_replicas": self.num_nodes * self.num_processes, "rank": self.global_rank}

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the process group: the given one, else the device's own."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and Lightning's rank-zero functions which rank this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # The setters may be no-ops; the getter is right in any case.
        for rank_zero_only in self._private.rank_zero_only:
            rank_zero_only.rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        check_devices(self.parallel_devices, self._private)
        by_script, by_multiprocessing = self._launchers
        if self._settings.start_method == "popen":
            self._launcher = by_script(self.cluster_environment, self.num_processes, self.num_nodes)
        else:
            self._launcher = by_multiprocessing(self, start_method=self._settings.start_method)

    # -- the process group --------------------------------------------------------------------------------------------
    def setup_environment(self) -> None:
        """Choose the device and join the process group."""
        self.set_world_ranks()  # a rank that multiprocessing started learns its number after Trainer() or Fabric()
        check_ranks(self.cluster_environment, self.num_processes, self.num_nodes, self._private)
        super().setup_environment()
        self._join_group()

    def _join_group(self) -> None:
        self.set_world_ranks()
        assert self.cluster_environment is not None
        device = self.root_device
        self._process_group_backend = self._process_group_backend or self._private.default_backend_for_device(device)
        self._private.init_dist_connection(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._settings.timeout or self._private.default_pg_timeout,
            device_id=device if device.type != "cpu" else None,
        )

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send a picklable object from one rank to all. Collective."""
        if not (dist.is_available() and dist.is_initialized()):
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src, group=dist.group.WORLD)
        return objects[0]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over the ranks, and anything else as it is. Collective."""
        if isinstance(tensor, torch.Tensor):
            return self._private.sync_ddp_if_available(tensor, group, reduce_op=reduce_op)
        return tensor
