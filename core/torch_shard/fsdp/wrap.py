"""The policies that choose which modules are wrapped, ``enable_wrap`` and ``wrap``.

All of them are torch's own, because none of them depends on the wrapping class.
"""

from torch.distributed.fsdp.wrap import *  # noqa: F403
from torch.distributed.fsdp.wrap import _module_wrap_policy as _module_wrap_policy
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _wrap_module_cls_individually as _wrap_module_cls_individually
