"""The part of :class:`.engine.Engine` that says what it does: traffic, waiting, memory, norms of gradients."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any

import torch

from .comm.traffic_statistics import Statistics, StreamWaits, waits
from .grad_clip import grad_norms as _grad_norms
from .optim.matrix.state import tensors_of
from .runtime.runtime import Runtime
from .shard_tensor.tensor import ShardTensor
from .unit.unit import Unit

__all__ = ["EngineStatistics"]


class EngineStatistics(abc.ABC):
    """Figures for monitors and for users' own logs."""

    _runtime: Runtime

    @property
    @abc.abstractmethod
    def units(self) -> list[Unit]:
        """The units, in the plan's order."""

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent for parameters and gradients since set-up, counted at the collectives.

        It grows with every gather and reduction. Deep copies of the model count together with it.
        """
        return self._runtime.collectives.bytes_sent

    @property
    def bytes_sent_across(self) -> int:
        """Of :attr:`bytes_sent`, those between copies of the parameters, under the hybrid strategies and ``no_shard``."""
        return self._runtime.collectives.bytes_sent_across

    def statistics(self) -> Statistics:
        """This rank's figures up to now: bytes sent, seconds waited, bytes gathered. Not collective, and cheap.

        Those of some steps are ``after.since(before)``. On the CPU, waiting is the time that the training thread stood still.
        On GPUs see :meth:`time_waiting`. What a communication hook sends and waits for is not counted; deep copies of the model
        are, in bytes sent and in waiting.
        """
        c, gathered = self._runtime.collectives, self._runtime.gathered_bytes
        gathers, reductions, others = waits(c)
        host = self._runtime.host
        return Statistics(
            c.bytes_sent,
            c.bytes_sent_across,
            gathers,
            reductions,
            others,
            gathered.now,
            gathered.peak,
            0.0 if host is None else host.waited(),
        )

    def time_waiting(self, enabled: bool = True) -> None:
        """On GPUs, time from now on what the streams that compute wait for collectives; elsewhere do nothing. Not collective.

        Without it :meth:`statistics` has no waiting for gathers and reductions on GPUs. It records two events around each wait,
        some microseconds of the host's time, and reads them when they have passed: nobody waits for the device, and the figures
        are behind what the host has issued by as much as the device is. A wait counts from the moment at which the stream comes
        to it; time in which the stream has nothing to do, because the host is late, does not count. What is waited for in small
        messages (``other_wait``) is the host's time in any case.
        """
        watch, device = self._runtime.collectives.watch, self._runtime.collectives.device
        if not enabled or device.type != "cuda":
            watch.stream_waits = None
        elif watch.stream_waits is None:
            watch.stream_waits = StreamWaits(device)

    def reset_peak_gathered(self) -> None:
        """Let ``statistics().peak_gathered`` begin anew, with what is gathered now. Not collective."""
        gathered = self._runtime.gathered_bytes
        gathered.peak = gathered.now

    def memory_summary(
        self, optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None
    ) -> dict[str, int]:
        """Bytes this rank holds now. Not collective.

        Args:
            optimizer: whose state is counted, or several; without it ``optimizer`` is 0.

        Returns:
            Bytes under ``parameters`` (this rank's shards), ``gradients`` (with what error feedback keeps of quantized
            ones), ``optimizer`` and ``gathered`` (units that are whole now, and what ``reshard_after_forward`` keeps of others).
        """
        parameters = gradients = state = 0
        for unit in self.units:
            for flat in unit.flats:
                parameters += flat.memory.nbytes
                held, quantized = flat.gradients.flat, flat.gradients.quantized
                gradients += held.nbytes if held is not None else 0
                gradients += quantized.nbytes if quantized is not None else 0
                with torch._C.DisableTorchFunctionSubclass():
                    for p in flat.params:
                        gradients += _own_bytes(p.grad) if p.grad is not None else 0
        several: Any = () if optimizer is None else optimizer if isinstance(optimizer, Iterable) else (optimizer,)
        for each in several:
            for entries in each.state.values():
                for value in tensors_of(entries):
                    state += _own_bytes(value)
        gathered = self._runtime.gathered_bytes.now
        return {"parameters": parameters, "gradients": gradients, "optimizer": state, "gathered": gathered}

    def grad_norms(
        self, norm_type: float = 2.0, parameters: Iterable[torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """The norm of the whole gradients of each unit. Collective: one small message for all units.

        Args:
            norm_type: any p > 0, ``inf`` included.
            parameters: count these alone, the same on all ranks; all that are sharded by default.

        Returns:
            For each unit's name a 0-d tensor of float64 on the engine's device, equal on all ranks; 0 where there is no gradient.

        Raises:
            ConfigError: another `norm_type`.
            ShardError: the gradients are not reduced yet, because the last backward ran under :meth:`no_sync`; or there are
                none to look at, because an optimizer steps in backward.
        """
        return _grad_norms.grad_norms(self._runtime, norm_type, parameters)


def _own_bytes(tensor: torch.Tensor) -> int:
    """What this rank has of it. Of a sharded one without its slice, which may just be written to."""
    count = tensor._spec.length if isinstance(tensor, ShardTensor) else tensor.numel()
    with torch._C.DisableTorchFunctionSubclass():
        return count * tensor.dtype.itemsize
