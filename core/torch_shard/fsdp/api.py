"""The settings of torch's FullyShardedDataParallel under the name of torch's own submodule; they are torch's classes."""

from torch.distributed.fsdp.api import *  # noqa: F403
from torch.distributed.fsdp.api import __all__ as __all__
