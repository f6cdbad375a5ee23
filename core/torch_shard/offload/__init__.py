"""Training with parameters, gradients and optimizer state in host memory: ``ShardConfig(offload="cpu")``."""

from .settings import Offload

__all__ = ["Offload"]
