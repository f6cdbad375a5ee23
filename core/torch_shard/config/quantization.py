"""Quantized communication: parameters and gradients travel as 8-bit codes with one scale for each block of them.

The ideas of ZeRO++ (Wang et al., 2023, arXiv 2306.10209): its quantized weights (qwZ), and its quantized gradients (qgZ), which
are sent once, by all-to-all, and summed after decoding, so that no sum is rounded to 8 bits. What the codes of a gradient have
lost is added to the next one: error feedback (Seide et al., 2014; Karimireddy et al., 2019, arXiv 1901.09847).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from ..config.param_dtypes import Dtypes
from ..errors import ConfigError, UnavailableError
from ..numerics.block_quantizer import BlockQuantizer
from ..numerics.dtypes import FLOATS
from .checks import check_bools, check_int, checked_modules, modules_named

__all__ = ["Quantized"]

_CODES = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
_LEAST_BLOCK = 16  # below, the scales are a quarter of the message and more
_FLOAT8_SINCE = (8, 9)  # compute capability of the first GPUs that have it


@dataclass(frozen=True)
class Quantized:
    """What is sent in 8 bits. Equal on all ranks; checked on construction.

    Concerns floating-point parameters of 16 bits or more, with at least two dimensions and `min_size` elements. All others
    (norms, biases, integer and 8-bit weights) are gathered bit for bit and reduced as they were: they are few bytes, and
    those whose values matter most. What is stored is not quantized, and nothing is where one rank holds everything.

    Attributes:
        parameters: each rank sends its shard as ``"int8"`` or, on GPUs from compute capability 8.9 on and on CPUs,
            ``"float8"`` (e4m3). All ranks compute with the decoded values, of their own shard too. None: as it is.
        gradients: each rank sends its gradients as ``"int8"``; the decoded parts of all ranks are summed in fp32 (in fp64
            where one of the dtypes is that). None: as they are.
        block: consecutive elements of a shard that share a scale, their largest absolute value by 127 (``"float8"``: 448).
            At least 16. A scale takes 4 bytes (8 for fp64).
        error_feedback: add what the codes of a gradient have lost to the gradient of the next reduction. A rank keeps that
            for *all* elements, in 2 bytes each (4 for fp64): it is not sharded. Not saved in checkpoints.
        keep: modules whose parameters are not quantized: classes (subclasses too) and patterns of module names, as in
            :attr:`ShardConfig.units`; their children included. What a kept module shares with another one is kept.
        min_size: elements below which a parameter is not quantized.

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
        """The modules of `model` that :attr:`keep` names, without their children.

        Raises:
            ConfigError: a pattern is the name of none. (A class that the model does not have is no mistake.)
        """
        return modules_named("quantized.keep", self.keep, model)

    def of(self, dtypes: Dtypes, shape: Sequence[int], trainable: bool, kept: bool) -> Dtypes:
        """`dtypes` of a parameter of this shape, with how it travels."""
        if kept or dtypes.stored not in FLOATS or (self.parameters is None and not trainable):
            return dtypes
        if len(shape) < 2 or math.prod(shape) < max(1, self.min_size):
            return dtypes
        return replace(dtypes, quantized=self)

    def check_device(self, device: torch.device) -> None:
        """Raise where the device does not have what is asked for.

        Raises:
            UnavailableError: names field and device. Not collective.
        """
        if self.parameters != "float8" or device.type == "cpu":  # which convert in software
            return
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FLOAT8_SINCE:
            return
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise UnavailableError(f"quantized.parameters: {name} has no float8; use 'int8', of the same size and finer.")

    def parameter_quantizer(self, dtypes: Dtypes, numel: int) -> BlockQuantizer | None:
        """How a shard of `numel` elements is sent; None: as it is."""
        if self.parameters is None:
            return None
        return BlockQuantizer(_CODES[self.parameters], numel, self.block, _wide(dtypes.stored))

    def gradient_quantizer(self, dtypes: Dtypes, numel: int) -> BlockQuantizer | None:
        """How the part of a gradient for one rank, of `numel` elements, is sent; None: as it is."""
        if self.gradients is None:
            return None
        return BlockQuantizer(_CODES[self.gradients], numel, self.block, _wide(dtypes.stored, dtypes.reduce))

    def residual_dtype(self, dtypes: Dtypes) -> torch.dtype | None:
        """In which dtype error feedback keeps what the codes have lost; None where there is none."""
        if self.gradients is None or not self.error_feedback:
            return None
        # It is below half a step of the code. Of that bf16 loses 1/512, which matters as little as in a bf16 gradient.
        return torch.float32 if _wide(dtypes.stored, dtypes.reduce) is torch.float64 else torch.bfloat16

    def summary(self) -> str:
        """For the plan: what is sent in fewer bits."""
        said = [f"{self.parameters} parameters"] if self.parameters is not None else []
        said += [f"{self.gradients} gradients"] if self.gradients is not None else []
        return "sends " + " and ".join(said)


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """In which codes are made and read."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
