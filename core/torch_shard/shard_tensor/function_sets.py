"""Sets of torch functions, by name or by object, that ``__torch_function__`` of a ShardTensor treats alike."""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import ELEMENTWISE, FOREACH, FUSED, NEW_TENSORS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_T: Any = torch.Tensor
_PROPERTIES = """
shape dtype device requires_grad ndim is_leaf layout grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn
is_nested is_sparse_csr is_mps is_xpu output_nr retains_grad names itemsize nbytes _version name is_vulkan is_xla
_backward_hooks _post_accumulate_grad_hooks
"""
_METHODS = """
size dim ndimension numel nelement stride element_size storage_offset is_floating_point is_complex is_signed
is_contiguous is_inference is_conj is_neg get_device __len__ __hash__ dim_order _is_view has_names is_same_size
"""
GETTERS = frozenset(
    [getattr(_T, n).__get__ for n in _PROPERTIES.split() if hasattr(getattr(_T, n, None), "__get__")]
    + [getattr(_T, n) for n in _METHODS.split() if hasattr(_T, n)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
)
"""Functions that read metadata, which is the same for the shard and the full tensor, so that nothing is substituted."""
DTYPE = _T.dtype.__get__
DEVICE = _T.device.__get__

# Functions that always get the ShardTensor itself, also where modules compute with the unsharded parameter. An alias must
# stay one of a parameter that can be unsharded (`F.linear(x, w.detach())`), flags belong to the user's object, and
# `new_tensor` reads no element.
OWN = _names(
    "__set__:requires_grad detach detach_ requires_grad_ retain_grad backward new_tensor is_pinned __repr__ __reduce_ex__ "
    "result_type"
)
# Functions that read the elements of the first operand, and of the other one only shape, dtype and device.
SHAPED_LIKE = _names("view_as expand_as reshape_as")
FORMS = SHAPED_LIKE | {"to", "type_as"}

SCALAR_REDUCTIONS = _names("sum mean std var amax amin any all count_nonzero")
"""Reductions whose second argument is the dimensions."""
EXTREMES = frozenset({"max", "min"})
NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})
"""Functions whose second argument is the order and whose third the dimensions."""
_OPERATORS = ["add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in _OPERATORS)
_OPERATOR_METHODS = _names("__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__") | {
    f"__{side}{name}__" for name in _OPERATORS for side in ("", "r")
}
ARITHMETIC = (
    ELEMENTWISE
    | {name + "_" for name in ELEMENTWISE}
    | IN_PLACE_OPERATORS
    | _OPERATOR_METHODS
    | {"expand_as", "view_as"}
)
"""Elementwise functions of one or several tensors."""
LISTS = frozenset(FOREACH | FUSED | {name + "_" for name in FOREACH | FUSED}) | {
    "_foreach_norm",
    "_amp_foreach_non_finite_check_and_unscale_",
}
"""Elementwise functions of lists of tensors."""
_INIT = _names(
    "uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
    "xavier_normal_ _no_grad_normal_ _no_grad_uniform_ _no_grad_fill_ _no_grad_zero_ _no_grad_trunc_normal_"
)
_CONVERSIONS = _names(
    "to type type_as half float double bfloat16 int long short bool byte char cfloat cdouble cpu cuda xpu contiguous conj"
)
_NUMBERS = _names("item __float__ __int__ __bool__ __index__ __complex__ __format__ __contains__ equal allclose")
ALWAYS_LOCAL = LISTS | NEW_TENSORS | _CONVERSIONS | _INIT | _NUMBERS
"""Functions for which shards suffice, whatever the operands' shapes are."""

SCALARS = SCALAR_REDUCTIONS | EXTREMES | NORMS | _NUMBERS | {"_foreach_norm"}
"""Functions whose result is one value, not a tensor of the parameter's shape: shards and a small message suffice for it."""

# Functions that would hand out the shard's memory as if it were the parameter's.
DENIED = _names(
    "numpy tolist data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ share_memory_ set_ resize_ "
    "resize_as_ apply_ map_ map2_ __cuda_array_interface__ _make_subclass"
)
EXPORTS = frozenset({"numpy", "__array__", "tolist"})
"""The denied functions that are given a full copy, since an edit of their result is impossible or is refused."""
INDEXED_EDITS = _names(
    "__setitem__ index_put_ index_fill_ index_copy_ index_add_ masked_scatter_ scatter_ scatter_add_"
)
"""Edits of the elements that indices or masks choose."""
_RESHAPED_IN_PLACE = _names("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_ as_strided_")


def creates(name: str) -> bool:
    """Return True if a function only takes shape and dtype from its operand (`zeros_like`, `new_empty`)."""
    return name.endswith("_like") or name.startswith("new_")


def initialises(name: str) -> bool:
    """Return True for a function of torch.nn.init that fills its operand without recording anything."""
    return name in _INIT


def exposes_memory(name: str) -> bool:
    """Return True if a function must not get an unsharded parameter that is resharded right after it.

    The function hands out an address or memory that would be gone, or gives the parameter itself another shape.
    """
    return name in _RESHAPED_IN_PLACE or (name in DENIED and name != "tolist")
