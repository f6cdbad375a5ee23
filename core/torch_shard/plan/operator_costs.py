"""What operators cost: floating-point operations, the bytes that they touch, and memory that kernels take for themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# The same products as in the kernels of devices, for which torch has the formulas.
_SAME_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_OVERWRITES = {
    "copy_", "fill_", "zero_", "uniform_", "normal_", "bernoulli_", "random_", "exponential_",
    "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
_CHANNELS = 8  # inputs of fewer channels are not copied into another layout
_WIDEST = 14  # the widest window of a convolution that is not unfolded into a matrix
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return an operator's floating-point operations by the formulas of ``torch.utils.flop_counter``; 0 where it has none."""
    packet = func._overloadpacket
    formula = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def workspace_of(func: Any, args: tuple[Any, ...], output: Any) -> int:
    """Return the bytes that an operator's kernel on the CPU takes beside its results and frees again; 0 where that is unknown.

    oneDNN computes convolutions and RNNs in layouts of its own, into which inputs, weights and results are copied, inputs of few
    channels excepted. Where the processor has no instructions for bfloat16, products are summed in fp32, of one matrix of a batch
    in each thread. The figures are those of float32 and bfloat16 on x86 with AVX-512, seen in the allocator's events; others
    differ.
    """
    if not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return 0
    if func in _PRODUCTS and output.dtype is torch.bfloat16 and not _has_bfloat16():
        matrices = min(torch.get_num_threads(), output.size(0)) if output.dim() == 3 else 1
        return int(4 * matrices * output.size(-2) * output.size(-1))
    if func is _aten.convolution.default:
        plain = _is_product(args[1])
        return 0 if plain else max(nbytes_of([output]), _reordered(args[0]) + nbytes_of([args[1]]))
    if func is _aten.convolution_backward.default:
        return _backward_workspace(*args[:3])
    if func is _aten.mkldnn_rnn_layer.default:
        return nbytes_of(args[1:3]) + _gates(args[0], args[10])
    if func is _aten.mkldnn_rnn_layer_backward.default:
        copies = 2 if args[1].dtype is torch.bfloat16 else 1  # of weights: the layouts of their gradients are fp32
        return copies * nbytes_of(args[1:3]) + _gates(args[0], args[15])
    return 0


def _is_product(weight: torch.Tensor) -> bool:
    """Return True for a convolution that is computed as a product of matrices, without other layouts."""
    return weight.dtype is torch.float32 and math.prod(weight.shape[2:]) == 1


def _backward_workspace(gradient: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor) -> int:
    """Return what backward of a convolution takes; most of it is for the gradient of the weight, made in another layout."""
    if _is_product(weight):
        return 0
    of_weight = nbytes_of([weight])
    cloned = 0 if gradient.is_contiguous() else nbytes_of([gradient])
    if weight.dtype is torch.bfloat16:  # summed in fp32, of one sample's transposed inputs at a time
        sample = nbytes_of([inputs, gradient]) // max(1, inputs.size(0))
        return cloned + max(nbytes_of([gradient]) + _reordered(inputs) + 2 * of_weight + sample, of_weight)
    if max(weight.shape[2:]) > _WIDEST:
        unfolded = math.prod(gradient.shape[2:]) * weight[0].numel() * weight.element_size()
        return cloned + 4 * of_weight + unfolded
    return cloned + max(nbytes_of([gradient]) + _reordered(inputs), of_weight)


def _has_bfloat16() -> bool:
    asks = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # private; torch 2.13
    return asks is None or bool(asks())


def size_hidden_results(func: Any, args: tuple[Any, ...], output: Any) -> None:
    """Give results the memory that they have on the CPU, where the fakes' rule leaves it out: oneDNN's for backward of an RNN.

    That is the gates, the hidden and cell states, and the gradients of these, of all time steps.
    """
    if func is _aten.mkldnn_rnn_layer.default and args[-1]:  # it trains
        length, batch, *_ = args[0].size()
        values, gradients = 4 * length + 5 * (length + 1), 6 * (length + 1)  # the latter in fp32
        output[3].untyped_storage().resize_((values * args[0].element_size() + gradients * 4) * batch * args[10])


def _gates(inputs: torch.Tensor, hidden: int) -> int:
    return 4 * inputs.size(0) * inputs.size(1) * hidden * inputs.element_size()


def _reordered(inputs: torch.Tensor) -> int:
    return nbytes_of([inputs]) if inputs.size(1) >= _CHANNELS else 0


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or results of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors_in(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)


def changed_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the arguments that an operator changes, by its schema."""
    if not func._schema.is_mutable:
        return
    for place, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            yield from tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))


def overwrites(func: Any) -> bool:
    """Return True if an operator doesn't read what it writes to."""
    return func._opname in _OVERWRITES


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; of one that is expanded, those that it has."""
    return sum(min(t.numel() * t.dtype.itemsize, t.untyped_storage().nbytes()) for t in tensors)


def dtype_of(tensors: Iterable[torch.Tensor]) -> torch.dtype | None:
    """Return the dtype of the first floating-point tensor; None if there is none."""
    return next((t.dtype for t in tensors if t.dtype.is_floating_point), None)
