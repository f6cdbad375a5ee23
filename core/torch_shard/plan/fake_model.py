"""Puts fake tensors in the place of a model's parameters and buffers, for a while: they have shapes and no memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import TraceError
from .step_trace import Kind


class FakeModel:
    """Fake tensors for the parameters, buffers and other tensors of a model, and for what optimizers hold of them.

    They are put into the modules themselves, since a step may reach those by other ways than the model that it is given.
    Tensors that share memory share it as fakes, too. Nothing of the model's size is allocated, whatever device it is on.

    Attributes:
        named: kind, full name, fake and type of the device of every parameter and buffer, the first registration of each, and
            of each tensor of an optimizer's state, under the name of its parameter. The fakes themselves are all the CPU's.
        parameters: the fake parameters by full name.
        names: their full names by id.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        mode: FakeTensorMode,
        device: str,
        dtypes: Mapping[str, torch.dtype],
    ):
        """Make the fakes; the model is not changed yet. Raises TraceError for tensors that can't have one.

        `dtypes` has the dtypes of the fakes of some parameters, by full name; the others have their own.
        """
        self.named: list[tuple[Kind, str, FakeTensor, str]] = []
        self.parameters: dict[str, FakeTensor] = {}
        self._model = model
        self._optimizers = list(optimizers)
        self._mode = mode
        self._device = device
        self._fakes: dict[int, tuple[torch.Tensor, FakeTensor]] = {}  # by id of the real tensor, which it keeps alive
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._saved: list[tuple[Any, Any]] = []
        for name, parameter in model.named_parameters():
            dtype = dtypes.get(name, parameter.dtype)
            fake = self._make(parameter, "parameter", name, device, dtype)
            self.parameters[name] = fake
            if parameter.grad is not None and dtype == parameter.dtype:
                fake.grad = self._make(parameter.grad, "gradient", name, device)
        self.names = {id(fake): name for name, fake in self.parameters.items()}
        for name, buffer in model.named_buffers():
            self._make(buffer, "buffer", name, device)

    def known(self, tensor: torch.Tensor) -> bool:
        """Return True for the real tensors that have a fake."""
        return id(tensor) in self._fakes

    def install(self) -> None:
        """Put the fakes into the modules and optimizers. :meth:`restore` must follow, also if this raises."""
        for name, module in self._model.named_modules():
            attributes = module.__dict__
            # Saved at once, since a step may change any of them. Containers keep their identity, which others may hold.
            self._saved += [
                (value, value.copy()) for value in attributes.values() if isinstance(value, (dict, list, set))
            ]
            self._saved.append((attributes, attributes.copy()))
            for attribute, value in list(attributes.items()):
                prefix = f"{name}.{attribute}" if name else attribute
                if isinstance(value, dict):
                    for key, entry in value.items():
                        value[key] = self._replaced(entry, f"{prefix}.{key}")
                elif type(value) is list:  # such as the _flat_weights of nn.LSTM
                    value[:] = [self._replaced(entry, f"{prefix}.{i}") for i, entry in enumerate(value)]
                elif type(value) is tuple:
                    attributes[attribute] = tuple(
                        self._replaced(entry, f"{prefix}.{i}") for i, entry in enumerate(value)
                    )
                else:
                    attributes[attribute] = self._replaced(value, prefix)
        for optimizer in self._optimizers:
            self._saved.append((optimizer.__dict__, optimizer.__dict__.copy()))
            optimizer.param_groups = [
                {**group, "params": [self._replaced(p, "") for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
            for parameter, state in optimizer.state.items():
                fake = self._replaced(parameter, "")
                name = self.names.get(id(fake), "")
                states[fake] = {key: self._state(value, parameter, name) for key, value in state.items()}
            optimizer.state = states

    def restore(self) -> None:
        """Give modules and optimizers back what they had: attributes, and the contents of lists, dicts and sets among them."""
        for container, contents in reversed(self._saved):
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)
        self._saved.clear()

    def _replaced(self, value: Any, name: str) -> Any:
        """Return the fake of a tensor, which is made if it has none yet, and everything else as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        found = self._fakes.get(id(value))
        return self._make(value, "buffer", name, self._device) if found is None else found[1]

    def _state(self, value: Any, parameter: torch.Tensor, name: str) -> Any:
        """Return the fake of an entry of an optimizer's state; counters may lie on another device than the parameter."""
        if not isinstance(value, torch.Tensor):
            return value
        beside = value.device == parameter.device or value.is_meta
        place, fake = self._device if beside else value.device.type, self.parameters.get(name)
        as_parameter = fake is not None and value.dim() and value.dtype == parameter.dtype
        return self._make(value, "optimizer state", name, place, fake.dtype if as_parameter else None)  # type: ignore[union-attr]

    def _make(
        self, tensor: torch.Tensor, kind: Kind, name: str, place: str, dtype: torch.dtype | None = None
    ) -> FakeTensor:
        if isinstance(tensor, FakeTensor) or is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
            raise TraceError(
                f"{kind} {name} is a {type(tensor).__name__} ({tensor.layout}): only plain tensors are traced."
            )
        if is_lazy(tensor):
            raise TraceError(f"{kind} {name} has no shape yet: run a forward first, which lazy modules need.")
        if dtype in (None, tensor.dtype):
            storage = tensor.untyped_storage()
            pair = self._storages.get(storage._cdata)
            if pair is None:
                shadow = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
                pair = self._storages[storage._cdata] = (storage, shadow)
            meta = torch.empty(0, dtype=tensor.dtype, device="meta")
            meta.set_(pair[1], tensor.storage_offset(), tensor.size(), tensor.stride())
        else:
            meta = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="meta")
        fake: Any = FakeTensor(self._mode, meta, torch.device("cpu"))
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, tensor.requires_grad)
        elif tensor.requires_grad and tensor.is_leaf:
            fake.requires_grad_()
        for key, value in tensor.__dict__.items():
            fake.__dict__.setdefault(key, value)  # marks such as `parameter._no_weight_decay`
        for hook in (tensor._backward_hooks or {}).values():
            fake.register_hook(hook)
        for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
            fake.register_post_accumulate_grad_hook(hook)
        self._fakes[id(tensor)] = (tensor, fake)
        self.named.append((kind, name, fake, place))
        return fake
