"""The module that Fabric calls in place of the user's."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._private import is_redirected


class ForwardModule(nn.Module):
    """Wraps the sharded module, as DDP does.

    Only where a strategy has wrapped the module does Fabric send marked methods (``mark_forward_method``, and a
    LightningModule's steps) through precision and forward, and refuse unmarked methods that call submodules.

    Attributes:
        module: the user's own module, sharded in place.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.train(module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward, or the marked method that Fabric has put in its place."""
        if is_redirected(self.module):
            # Not module(...): that would run a module.compile()d forward in the method's place.
            return nn.Module._call_impl(self.module, *args, **kwargs)
        return self.module(*args, **kwargs)


def inner(module: Any) -> Any:
    """Return the user's own module of one that may be wrapped."""
    return module.module if isinstance(module, ForwardModule) else module


def unwrapped(module: Any) -> Any:
    """Return the user's own module inside of what ``fabric.setup`` or ``torch.compile`` returned."""
    for name in ("_orig_mod", "_forward_module", "_orig_mod"):  # compiled after it was set up, and before
        module = getattr(module, name, module)
    return inner(module)
