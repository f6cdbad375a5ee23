"""Training with parameters, gradients or optimizer state in host memory, or optimizer state on disk:
``ShardConfig(offload="cpu")``.
"""

from .settings import Offload

__all__ = ["Offload"]
