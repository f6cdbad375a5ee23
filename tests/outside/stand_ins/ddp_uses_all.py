"""DDP looks for no unused parameters, which transformers' Trainer asks for: for the run under DDP alone.

The models of sentence-transformers' CrossEncoder return a BatchEncoding, in which DDP finds no tensors. It takes all parameters
for unused, and their gradients then for second ones ("Expected to mark a variable ready only once").
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "torch.nn.parallel.distributed"


def apply(module: ModuleType) -> None:
    init = module.DistributedDataParallel.__init__

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**kwargs, "find_unused_parameters": False})

    module.DistributedDataParallel.__init__ = __init__
