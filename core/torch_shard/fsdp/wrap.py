"""The policies that choose which modules are wrapped, ``enable_wrap`` and ``wrap``.

All of them are torch's own, because none of them depends on the wrapping class.
"""

from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as ModuleWrapPolicy
from torch.distributed.fsdp.wrap import _module_wrap_policy as _module_wrap_policy
from torch.distributed.fsdp.wrap import _or_policy as _or_policy
from torch.distributed.fsdp.wrap import _Policy as _Policy
from torch.distributed.fsdp.wrap import _wrap_module_cls_individually as _wrap_module_cls_individually
from torch.distributed.fsdp.wrap import always_wrap_policy as always_wrap_policy
from torch.distributed.fsdp.wrap import enable_wrap as enable_wrap
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy as lambda_auto_wrap_policy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy as size_based_auto_wrap_policy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy as transformer_auto_wrap_policy
from torch.distributed.fsdp.wrap import wrap as wrap
