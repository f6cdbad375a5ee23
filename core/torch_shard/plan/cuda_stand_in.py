"""Lets a step for CUDA be traced on any machine: fake tensors of the CPU stand for those on the device.

Autograd asks the driver for a stream where it meets a CUDA tensor, fake or not, so torch without CUDA can't run a backward of
them. Here all fakes are the CPU's, and what torch does differently on CUDA is done for them, as far as it changes memory or
arithmetic: which attention kernel, which casts under autocast, multi-tensor kernels in optimizers, copies between devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.cuda.amp.common as amp_common
import torch.nn.functional as F
import torch.optim.optimizer as torch_optimizer
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices
from torch.utils.checkpoint import DefaultDeviceType

from ..utils.autograd_private import graph_task
from .storages import Storages

_aten = torch.ops.aten
_cuda: Any = vars(torch)["cuda"]  # only patched: what it says of this machine is not used

# What autocast runs in float32 on CUDA, from "CUDA Ops that can autocast to float32" in torch's documentation of torch.amp,
# except for what the CPU's list has, too.
_FLOAT32 = (
    "acos", "asin", "binary_cross_entropy_with_logits", "cosh", "cosine_similarity", "cross_entropy", "dist", "erfinv", "exp",
    "expm1", "group_norm", "hinge_embedding_loss", "kl_div", "l1_loss", "layer_norm", "log", "log10", "log1p", "log2",
    "log_softmax", "mse_loss", "nll_loss", "norm", "normalize", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt", "sinh",
    "smooth_l1_loss", "softmax", "softmin", "softplus", "tan",
)  # fmt: skip
_ACCUMULATE_IN_FLOAT32 = ("sum", "prod", "cumsum", "cumprod")  # cast inside of the kernel


def _functions(names: Sequence[str]) -> set[Callable[..., Any]]:
    """Return the functions and methods of torch with these names."""
    found = (getattr(place, name, None) for name in names for place in (F, torch, Tensor, torch._C._nn))
    return {function for function in found if function is not None}


class CudaStandIn(TorchFunctionMode):
    """A mode in which the functions of torch treat the tensors that are meant for CUDA as CUDA would.

    With `all_on_device` the program names the CPU, and means the device. Enter it by :meth:`entered`.
    """

    def __init__(self, storages: Storages, all_on_device: bool):
        super().__init__()
        self._storages = storages
        self._all_on_device = all_on_device
        self._in_float32 = _functions(_FLOAT32)
        self._accumulate_in_float32 = _functions(_ACCUMULATE_IN_FLOAT32)
        self._recomputing: nn.Module | None = None
        self._attention = F.scaled_dot_product_attention

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the mode, and replace what torch says of this machine's device, too."""
        kernels = ("cpu", *_get_foreach_kernels_supported_devices())
        with (
            patch.object(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: list(kernels)),
            patch.object(amp_common, "amp_definitely_not_available", lambda: False),
            patch.object(_cuda, "is_bf16_supported", lambda *_: True),
            # The device whose autocast a checkpoint restores if it sees only tensors of the CPU.
            patch.object(DefaultDeviceType, "_default_device_type", "cuda"),
            # F.multi_head_attention_forward calls it where this mode doesn't see it.
            patch.object(F, "scaled_dot_product_attention", self._attend),
            self,
            register_module_forward_pre_hook(self._recomputes),
            register_module_forward_hook(self._has_recomputed, always_call=True),
        ):
            yield

    def _recomputes(self, module: nn.Module, args: object) -> None:
        """Enter the mode again: autograd runs without such modes, and so would the forwards that checkpoints recompute."""
        if self._recomputing is None and graph_task() != -1:
            self._recomputing = module
            self.__enter__()

    def _has_recomputed(self, module: nn.Module, args: object, output: object) -> None:
        if self._recomputing is module:
            self._recomputing = None
            self.__exit__(None, None, None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one function of torch."""
        kwargs = {} if kwargs is None else kwargs
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        if func is Tensor.cuda or func is Tensor.cpu:
            layout = kwargs.get("memory_format", torch.preserve_format)
            to_host = None if self._all_on_device else "cpu"
            return self._moved(args[0], "cuda" if func is Tensor.cuda else to_host, None, False, layout)
        if func is self._attention:
            return self._attend(*args, **kwargs)
        with self._autocast():
            if self._casts_to() is not None:
                if func in self._in_float32:
                    args = tuple(_float32(value) for value in args)
                    kwargs = {name: _float32(value) for name, value in kwargs.items()}
                elif func in self._accumulate_in_float32 and args and _is_half(args[0]):
                    kwargs = {"dtype": torch.float32, **kwargs}
            return func(*args, **kwargs)

    @contextlib.contextmanager
    def _autocast(self) -> Iterator[None]:
        """Make autocast for CUDA hold for the CPU."""
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        wanted = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        if (self._all_on_device and before[0]) or before == wanted or not (before[0] or wanted[0]):
            yield
            return
        torch.set_autocast_enabled("cpu", wanted[0])
        torch.set_autocast_dtype("cpu", wanted[1])
        try:
            yield
        finally:
            torch.set_autocast_enabled("cpu", before[0])
            torch.set_autocast_dtype("cpu", before[1])

    def _casts_to(self) -> torch.dtype | None:
        """Return the dtype of the autocast that holds, or None."""
        for device in ("cuda", "cpu") if self._all_on_device else ("cuda",):
            if torch.is_autocast_enabled(device):
                return torch.get_autocast_dtype(device)
        return None

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        other = args[0] if args else kwargs.pop("other", None)
        if isinstance(other, Tensor):
            return self._moved(tensor, self._storages.place_of(other), other.dtype, copy, torch.preserve_format)
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        place = None if device is None else device.type
        return self._moved(tensor, place, dtype, copy, torch.preserve_format if layout is None else layout)

    def _moved(
        self, tensor: Tensor, place: str | None, dtype: torch.dtype | None, copy: bool, layout: torch.memory_format
    ) -> Tensor:
        """Do what ``tensor.to`` does, which sees no difference between the devices here."""
        dtype = tensor.dtype if dtype is None else dtype
        if self._all_on_device and place is not None:
            # A batch that is a part of a dataset, say, of which nothing else goes to the device.
            return tensor.to(dtype, copy=copy or tensor._is_view(), memory_format=layout)
        if place in (None, self._storages.place_of(tensor)):
            return tensor.to(dtype, copy=copy, memory_format=layout)
        with self._storages.placing(str(place)):
            moved: Tensor = _aten._to_copy.default(tensor, dtype=dtype, memory_format=layout)
        return moved

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Choose the kernel as torch does on CUDA, where FlashAttention comes first, then the memory-efficient one.

        Kernels of cuDNN hold the same tensors as FlashAttention. Sources: ``sdp_utils.cpp`` of torch;
        Dao, "FlashAttention-2" (2023); Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory" (2021).
        """
        dtype = self._casts_to()
        if dtype is not None:
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        width = query.size(-1)
        half = query.dtype in (torch.float16, torch.bfloat16)
        fits = query.dim() == 4 and width == value.size(-1)
        if fits and half and attn_mask is None and width <= 256:
            # The kernel takes widths that divide by 8.
            query, key, value = (F.pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
            scale = width**-0.5 if scale is None else scale
            out: Tensor = _aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
            return out[..., :width]
        if fits and (half or query.dtype == torch.float32) and not (enable_gqa and query.size(1) != key.size(1)):
            bias = attn_mask
            if bias is not None:
                if bias.dtype == torch.bool:
                    bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
                bias = bias.expand(query.size(0), query.size(1), query.size(2), key.size(2))
            grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
            out = _aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, grad, dropout_p, is_causal, scale=scale
            )[0]
            return out
        return _aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]


def _is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _float32(value: Any) -> Any:
    return value.float() if _is_half(value) else value
