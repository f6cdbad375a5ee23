"""Quantized communication: parameters and gradients are sent as 8-bit codes with one scale for each block of elements.

This is ZeRO++ (Wang et al., 2023, arXiv 2306.10209): its quantized weights (qwZ), and its quantized gradients (qgZ), which are
sent once, by all-to-all, and summed after decoding, so that no sum is rounded to 8 bits. Error feedback adds the rounding error
of a gradient to the next gradient (Seide et al., 2014; Karimireddy et al., 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ConfigError, UnavailableError
from ..numerics.block_quantizer import BlockQuantizer
from ..numerics.dtypes import FLOATS
from .checks import check_bools, check_int, checked_modules, modules_named
from .param_dtypes import Dtypes

_CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
_LEAST_BLOCK = 16  # with fewer elements, the scales are a quarter of the message and more
_FLOAT8_SINCE = (8, 9)  # compute capability of the first GPUs that have float8


@dataclass(frozen=True)
class Quantized:
    """The parameters and gradients that are sent in 8 bits, equal on all ranks. The settings are checked when they are made.

    They apply to floating-point parameters of 16 bits or more, with at least two dimensions and `min_size` elements. All others
    (norms, biases, integer and 8-bit weights) are gathered bit for bit and reduced as without: they are few bytes, and their
    values matter most. Stored values are not quantized, and nothing is if one rank holds everything.

    Attributes:
        parameters: the code of the shards that each rank sends: ``"int8"`` or, on GPUs from compute capability 8.9 on and on
            CPUs, ``"float8"`` (e4m3). All ranks compute with decoded values, of their own shards too. None sends the values.
        gradients: the code of the gradients that each rank sends, ``"int8"``. The decoded parts of all ranks are summed in fp32,
            or in fp64 if one of the dtypes is fp64. None sends the values.
        block: the number of consecutive elements of a shard that share a scale, at least 16. The scale is their largest absolute
            value divided by 127 (``"float8"``: 448), and takes 4 bytes (8 for fp64).
        error_feedback: add the rounding errors of a gradient to the gradient of the next reduction. Each rank keeps them for
            *all* elements, in 2 bytes each (4 for fp64), since they can't be sharded. They are not saved in checkpoints.
        keep: modules whose parameters are not quantized: classes (subclasses too) and patterns of module names, as in
            :attr:`ShardConfig.units`; their children included. A parameter that a kept module shares with another is kept.
        min_size: the number of elements below which a parameter is not quantized.

    Raises:
        ConfigError: a value is unknown or of the wrong type; the message starts with ``quantized.`` and the field.

    Not collective.
    """

    parameters: Literal["int8", "float8"] | None = None
    gradients: Literal["int8"] | None = None
    block: int = 256
    error_feedback: bool = True
    keep: Any = ()
    min_size: int = 4096

    def __post_init__(self) -> None:
        for field, known in (("parameters", ("int8", "float8")), ("gradients", ("int8",))):
            value = getattr(self, field)
            if value is not None and value not in known:
                raise ConfigError(f"quantized.{field} must be {' or '.join(map(repr, known))} or None, not {value!r}.")
        if self.parameters is None and self.gradients is None:
            raise ConfigError("quantized.parameters and quantized.gradients are both None; set one, or quantized=None.")
        check_int("quantized.block", self.block, least=_LEAST_BLOCK)
        check_int("quantized.min_size", self.min_size, least=0)
        check_bools(self, "error_feedback", prefix="quantized.")
        object.__setattr__(self, "keep", checked_modules("quantized.keep", self.keep))

    def kept_modules(self, model: nn.Module) -> set[nn.Module]:
        """Return the modules of `model` that :attr:`keep` chooses, see :func:`.checks.modules_named`."""
        return modules_named("quantized.keep", self.keep, model)

    def of(self, dtypes: Dtypes, shape: Sequence[int], trainable: bool, kept: bool) -> Dtypes:
        """Return `dtypes` of a parameter of this shape, with these settings if it is quantized."""
        if kept or dtypes.stored not in FLOATS or (self.parameters is None and not trainable):
            return dtypes
        if len(shape) < 2 or math.prod(shape) < max(1, self.min_size):
            return dtypes
        return dtypes._replace(quantized=self)

    def check_device(self, device: torch.device) -> None:
        """Raise an UnavailableError if the device lacks float8 and it is asked for. Not collective."""
        if self.parameters != "float8" or device.type == "cpu":  # CPUs convert in software
            return
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FLOAT8_SINCE:
            return
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise UnavailableError(f"quantized.parameters: {name} has no float8; use 'int8', of the same size and finer.")

    def parameter_quantizer(self, dtypes: Dtypes, numel: int) -> BlockQuantizer | None:
        """Return the quantizer of a shard of `numel` elements; None if its values are sent."""
        if self.parameters is None:
            return None
        return BlockQuantizer(_CODES[self.parameters], numel, self.block, _wide(dtypes.stored))

    def gradient_quantizer(self, dtypes: Dtypes, numel: int) -> BlockQuantizer | None:
        """Return the quantizer of a rank's part of a gradient, of `numel` elements; None if its values are sent."""
        if self.gradients is None:
            return None
        return BlockQuantizer(_CODES[self.gradients], numel, self.block, _wide(dtypes.stored, dtypes.reduce))

    def residual_dtype(self, dtypes: Dtypes) -> torch.dtype | None:
        """Return the dtype in which error feedback keeps rounding errors; None without error feedback."""
        if self.gradients is None or not self.error_feedback:
            return None
        # An error is below half a step of the code. Of it bf16 loses 1/512, which matters as little as in a bf16 gradient.
        return torch.float32 if _wide(dtypes.stored, dtypes.reduce) is torch.float64 else torch.bfloat16

    def summary(self) -> str:
        """Return the settings as text, for the plan."""
        codes = {"parameters": self.parameters, "gradients": self.gradients}
        return "sends " + " and ".join(f"{code} {what}" for what, code in codes.items() if code is not None)


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are encoded and decoded."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
