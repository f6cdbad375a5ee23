"""Mixed precision: the dtypes in which parameters are stored, computed with and reduced.

Between steps parameters, gradients and optimizer state have the dtype in which they are *stored* (fp32, as a rule). A unit is
gathered in the dtype in which modules *compute*: each rank casts its shard before the gather, so that half the bytes are sent and
no full fp32 copy exists. Gradients are *reduced* in a dtype of their own and then have the stored dtype. (Over Gloo they are also
summed in the stored dtype if parameters are sharded.) This is "Mixed Precision Training" (Micikevicius et al., 2018) on shards,
as in ZeRO and FSDP.
"""

from __future__ import annotations

import dataclasses
import glob
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ConfigError, UnavailableError
from ..log import logger
from ..numerics.dtypes import FLOATS
from .autocast_params import is_cast
from .checks import check_bools, checked_modules, modules_named
from .param_dtypes import Dtypes

if TYPE_CHECKING:
    from .shard_config import ShardConfig


NORMS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.batchnorm._NormBase,
    nn.LocalResponseNorm,
)
"""torch's normalisations, for :attr:`Precision.keep`; see also :func:`norms_in`."""

_NORM = re.compile(r"\w*Norm(\dd)?")


def norms_in(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of normalisations in `model`: torch's, and others whose names end in ``Norm`` (``LlamaRMSNorm``)."""
    found = {type(m): None for m in model.modules() if isinstance(m, NORMS) or _NORM.fullmatch(type(m).__name__)}
    return tuple(sorted(found, key=lambda kind: f"{kind.__module__}.{kind.__qualname__}"))


def _packed_in(model: nn.Module) -> tuple[type[nn.Module] | str, ...]:
    """Return the modules of `model` that directly hold weights in a packed format.

    Such weights are integers or 8-bit values of two dimensions or more. The modules' other tensors, such as scales, belong to the
    format, and must not be cast.
    """
    tensors = {name: [*m._parameters.values(), *m._buffers.values()] for name, m in model.named_modules()}
    found = [name for name, own in tensors.items() if any(t is not None and _is_packed(t) for t in own)]
    return tuple(glob.escape(name) if name else type(model) for name in found)


def _is_packed(tensor: torch.Tensor) -> bool:
    # Masks are bool, and positions 64-bit integers.
    return tensor.dim() > 1 and tensor.dtype not in (*FLOATS, torch.bool, torch.int64) and not tensor.is_complex()


@dataclass(frozen=True)
class Precision:
    """The dtypes of one engine, which must be equal on all ranks. They are checked when they are made.

    Only floating-point parameters of 16 bits or more are ever cast: integer, packed and 8-bit ones are gathered bit for bit.
    Frozen parameters are not cast to a wider dtype.

    Attributes:
        param_dtype: the dtype in which parameters are gathered and computed with; None for their own.
        reduce_dtype: the dtype in which gradients are reduced; None for that of the computation. Accumulation on one rank
            (``no_sync``) and in ``.grad`` is never narrower than fp32 if parameters are stored in fp32.
        buffer_dtype: the dtype to which floating-point buffers are converted in ``shard``, for good, except those of `keep`; None
            for their own.
        output_dtype: the dtype to which floating-point tensors that the root module returns are cast; None for their own.
        master_dtype: the dtype in which trainable parameters, their gradients and optimizer state are stored between steps:
            ``torch.float32`` gives a bf16 model fp32 masters. The model still computes in its own dtype, or `param_dtype`.
            None for their own.
        cast_inputs: cast the floating-point tensors that a module is called with to the dtype in which it computes: True for
            the root and for the modules of each unit; ``"root"`` for the root alone; False for none, as a rule under autocast.
            Nothing is cast if the module computes in the stored dtype.
        cast_params: ``"all"``, or ``"autocast"`` to compute with those parameters alone in `param_dtype` that torch.autocast
            would cast: the operands of matrix products and convolutions, see :mod:`torch_shard.config.autocast_params`. All
            others are kept. It needs ``cast_inputs=False``, and autocast around the forward.
        keep: modules whose parameters are computed with and reduced as they are stored: classes (subclasses too) and patterns
            of module names, as in :attr:`ShardConfig.units`; their children included. Unless `cast_inputs` is False, their
            inputs are cast to that dtype, and their outputs back to the dtype of the inputs.
        keep_low_precision_grads: leave ``.grad`` in `reduce_dtype`, which takes half the memory. Element-wise optimizers get it
            in the parameter's dtype, flat tensor by flat tensor; optimizers of full matrices refuse it. By default ``.grad`` has
            the parameter's dtype.
        stochastic_rounding: step parameters that are stored in bf16 in fp32, and round the results up or down at random, so that
            they are right on average and updates too small for bf16 add up, see
            :mod:`torch_shard.numerics.stochastic_rounding`. Optimizer state is fp32. At least one trainable parameter must be
            stored in bf16.

    Raises:
        ConfigError: a value is unknown or of the wrong type; the message starts with ``precision.`` and the field.

    Not collective.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    cast_inputs: bool | str = True
    cast_params: str = "all"
    keep: Any = ()
    keep_low_precision_grads: bool = False
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype", "master_dtype"):
            value = getattr(self, field)
            if value is not None and value not in FLOATS:
                known = ", ".join(str(dtype) for dtype in FLOATS)
                raise ConfigError(f"precision.{field} must be one of {known} or None, not {value!r}.")
        if not isinstance(self.cast_inputs, bool) and self.cast_inputs != "root":
            raise ConfigError(f"precision.cast_inputs must be True, False or 'root', not {self.cast_inputs!r}.")
        if self.cast_params not in ("all", "autocast"):
            raise ConfigError(f"precision.cast_params must be 'all' or 'autocast', not {self.cast_params!r}.")
        if self.cast_params == "autocast" and self.cast_inputs:
            raise ConfigError(
                "precision.cast_params='autocast' needs cast_inputs=False: the parameters that are kept meet inputs as autocast "
                "leaves them."
            )
        check_bools(self, "keep_low_precision_grads", "stochastic_rounding", prefix="precision.")
        object.__setattr__(self, "keep", checked_modules("precision.keep", self.keep))

    def kept_modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of `model` that :attr:`keep` chooses, see :func:`.checks.modules_named`."""
        return modules_named("precision.keep", self.keep, model)

    def keeps(self, holders: Iterable[tuple[nn.Module, str]], param: nn.Parameter) -> bool:
        """Return True if :attr:`cast_params` keeps a parameter that these modules hold, as attributes of these names."""
        return self.cast_params == "autocast" and not all(is_cast(module, name, param) for module, name in holders)

    def check_rounding(self, stored: Iterable[torch.dtype]) -> None:
        """Raise if :attr:`stochastic_rounding` is set and none of `stored`, the dtypes of trainable parameters, is bf16."""
        found = list(dict.fromkeys(stored))
        if self.stochastic_rounding and torch.bfloat16 not in found:
            kept = ", ".join(map(str, found)) or "nothing, since there are none"
            raise ConfigError(
                f"precision.stochastic_rounding: trainable parameters are stored in {kept}, and only bfloat16 is rounded. Leave "
                "it out, or convert the model to bfloat16, or set precision.master_dtype=torch.bfloat16."
            )

    def rounds(self, stored: torch.dtype) -> bool:
        """Return True if steps of parameters that are stored in this dtype are rounded stochastically."""
        return self.stochastic_rounding and stored is torch.bfloat16

    def dtypes(self, stored: torch.dtype, trainable: bool, kept: bool) -> Dtypes:
        """Return the dtypes of a parameter that the model has in dtype `stored`."""
        if stored not in FLOATS:
            return Dtypes(stored, stored, stored, stored)
        own = stored
        if self.master_dtype is not None and trainable:
            stored = self.master_dtype
        compute = stored if kept else self.param_dtype or own
        if not trainable and compute.itemsize > own.itemsize:
            compute = own
        reduce = compute if kept or self.reduce_dtype is None else self.reduce_dtype
        return Dtypes(stored, compute, reduce, reduce if self.keep_low_precision_grads else stored)

    def stored_in(self, module: nn.Module) -> torch.dtype:
        """Return the dtype in which the parameters of `module` are stored."""
        for p in module.parameters():
            if p.is_floating_point() and p.element_size() > 1:
                return self.dtypes(p.dtype, p.requires_grad, True).stored
        return self.master_dtype or torch.get_default_dtype()

    def check_device(self, device: torch.device) -> None:
        """Raise an UnavailableError if the device lacks one of the dtypes. Not collective."""
        for field in ("param_dtype", "reduce_dtype"):
            if getattr(self, field) is torch.bfloat16 and not has_bf16(device):
                name = torch.cuda.get_device_name(device)
                raise UnavailableError(
                    f"precision.{field}: {name} has no bfloat16; use torch.float16 with a GradScaler."
                )


def has_bf16(device: torch.device) -> bool:
    """Return True if a device computes in bfloat16 itself; the CPU always does, though slowly on some machines."""
    if device.type != "cuda":
        return True
    with torch.cuda.device(device):
        return torch.cuda.is_bf16_supported(including_emulation=False)


NONE = Precision()
"""The precision that leaves every dtype as it is."""


def precision_of(setting: Precision | torch.dtype | None) -> Precision:
    """Return the Precision that a value of ``ShardConfig.precision`` stands for."""
    if isinstance(setting, torch.dtype):
        return Precision(param_dtype=setting)
    return NONE if setting is None else setting


def for_autocast(config: ShardConfig, model: nn.Module, dtype: torch.dtype, setting: str) -> ShardConfig:
    """Return `config` with the precision that suits autocast to `dtype`, unless the user has set one. For front ends.

    Autocast alone casts each weight when it is used, and keeps the full copy until backward. With this precision parameters are
    gathered in `dtype`, so that autocast need not cast them and half the bytes are sent. What autocast does not cast is kept as
    it is stored (:attr:`Precision.cast_params`), and so are modules with packed weights.

    Args:
        config: the user's settings.
        model: the model.
        dtype: the dtype of autocast.
        setting: the setting by which the user has chosen autocast, for the warning.

    Not collective.
    """
    if config.precision is None:
        precision = Precision(dtype, cast_inputs=False, cast_params="autocast", keep=_packed_in(model))
        return dataclasses.replace(config, precision=precision)
    if config.strategy != "no_shard" and config.precision == NONE:
        logger.warning(
            "%s with ShardConfig(precision=Precision()) is autocast alone, which keeps a low-precision copy of every "
            "weight, whole on each rank, until backward. Leave ShardConfig.precision out to gather weights in low precision.",
            setting,
        )
    return config
