"""Training with parameters, gradients or optimizer state in host memory, or optimizer state on disk:
``ShardConfig(offload="cpu")``.
"""

from ..config.offload import Offload

__all__ = ["Offload"]
