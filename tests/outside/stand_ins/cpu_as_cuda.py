"""The CPU answers where a program insists on a GPU: ``cuda`` in a device's name, or its number, means ``cpu``."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "torch"


def apply(torch: ModuleType) -> None:
    from torch.overrides import TorchFunctionMode

    def on_cpu(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("cuda"):
            return "cpu"
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

    def moved(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = "cpu"
            return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

        return call

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return moved(function)(*args, **(kwargs or {}))

    OnCpu().__enter__()  # for the life of the process
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.nn.Module.to = moved(torch.nn.Module.to)
    torch.amp.autocast.__init__ = moved(torch.amp.autocast.__init__)
    torch.load = moved(torch.load)
    wrap = torch.nn.parallel.DistributedDataParallel

    # A model on the CPU has no GPU's number. The class of this package is a subclass with an __init__ of its own.
    def without_devices(begin: Any) -> Any:
        @functools.wraps(begin)
        def init(self: Any, *args: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            begin(self, *args, **kwargs)

        return init

    wrap.__init__ = without_devices(wrap.__init__)
    subclass = wrap.__init_subclass__

    def __init_subclass__(cls: Any, **kwargs: Any) -> None:
        subclass(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = without_devices(cls.__init__)

    wrap.__init_subclass__ = classmethod(__init_subclass__)
