"""Offload: parameters, gradients and optimizer state in host memory or on disk (``ShardConfig(offload="cpu")``)."""

from ..config.offload import Offload

__all__ = ["Offload"]
