"""Block-wise symmetric quantization: the arithmetic, without any communication.

A row of values becomes one *payload* of bytes::

    [ scale of block 0 | scale of block 1 | ... | code 0 | code 1 | ... | padding to 16 bytes ]

A block's scale is its largest absolute value, divided by the largest code. A value's code is value / scale, rounded to nearest,
and the decoded value is code * scale. If a block has a NaN or an infinity, so is its scale, and no decoded value is finite: the
receiver sees that, as it would have without quantization. Blocks whose scale is below the smallest normal number are decoded as
zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..layout.flat_layout import aligned

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}

# The number of elements that are worked on at a time. On a CPU it is so small that intermediate values stay in a core's cache;
# on a GPU it is large, for few passes, and only limits their memory.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 24


class BlockQuantizer(NamedTuple):
    """Encodes rows of `numel` values to payloads, and decodes them.

    Attributes:
        dtype: the dtype of the codes, int8 or float8_e4m3fn.
        numel: the number of values in a row. The last block may be shorter than the others.
        block: the number of values that share a scale.
        wide: the dtype of the scales and of all arithmetic, float32 or float64.
    """

    dtype: torch.dtype
    numel: int
    block: int
    wide: torch.dtype

    @property
    def blocks(self) -> int:
        """The number of scales in a row."""
        return -(-self.numel // self.block)

    @property
    def nbytes(self) -> int:
        """The bytes of a payload."""
        return aligned(self.blocks * self.wide.itemsize + self.numel)

    def encode(self, values: torch.Tensor, payloads: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Encode rows of values.

        Args:
            values: shape (rows, `numel`), of any floating-point dtype.
            payloads: shape (rows, `nbytes`), uint8; overwritten.
            residual: shape (rows, `numel`). It is added to `values`, and then overwritten with what the codes have lost of the
                sum, or with 0 in blocks that have a value which is not finite.
        """
        scales, codes = self._parts(payloads)
        for start, stop, width in self._pieces(values):
            part = values[:, start:stop].to(self.wide)
            if residual is not None:
                part = part + residual[:, start:stop]
            part = part.unflatten(1, (-1, width))
            scale = part.abs().amax(dim=2, keepdim=True).div_(_LARGEST[self.dtype])
            # With a smaller scale the quotient could be infinite, and the code undefined.
            scale.masked_fill_(scale < torch.finfo(self.wide).tiny, 0.0)
            code = part / scale.masked_fill(scale == 0.0, 1.0)
            if not self.dtype.is_floating_point:
                code.round_()
            codes[:, start:stop].unflatten(1, (-1, width)).copy_(code)
            first = start // self.block
            scales[:, first : first + scale.shape[1]].copy_(scale.squeeze(2))
            if residual is not None:
                torch.sub(part, self._decoded(codes[:, start:stop], scale), out=code)
                residual[:, start:stop].copy_(code.nan_to_num_(0.0, 0.0, 0.0).flatten(1))

    def decode(self, payloads: torch.Tensor, into: torch.Tensor) -> None:
        """Fill `into`, shape (rows, `numel`), from as many payloads. Values are rounded to its dtype once."""
        scales, codes = self._parts(payloads)
        for start, stop, width in self._pieces(into):
            scale = self._scale(scales, start, stop, width)
            into[:, start:stop].unflatten(1, (-1, width)).copy_(self._decoded(codes[:, start:stop], scale))

    def decode_sum(self, payloads: torch.Tensor, into: torch.Tensor) -> None:
        """Fill `into`, of `numel` elements, with the sum of the payloads' rows, added in order and rounded to its dtype once."""
        scales, codes = self._parts(payloads)
        for start, stop, width in self._pieces(codes):
            scale = self._scale(scales, start, stop, width)
            total, *rest = self._decoded(codes[:, start:stop], scale).unbind(0)
            for row in rest:
                total += row
            into[start:stop].copy_(total.flatten())

    def _parts(self, payloads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.blocks * self.wide.itemsize
        codes = payloads[:, end : end + self.numel]
        return payloads[:, :end].view(self.wide), codes.view(self.dtype)

    def _pieces(self, rows: torch.Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield the begin and the end of each part of a row to work on, and the size of its blocks."""
        most = _PIECE.get(rows.device.type, _PIECE_ELSEWHERE) // max(1, rows.shape[0])
        step = max(self.block, most // self.block * self.block)
        full_blocks = self.numel // self.block * self.block
        for start in range(0, full_blocks, step):
            yield start, min(full_blocks, start + step), self.block
        if full_blocks < self.numel:
            yield full_blocks, self.numel, self.numel - full_blocks

    def _scale(self, scales: torch.Tensor, start: int, stop: int, width: int) -> torch.Tensor:
        first = start // self.block
        return scales[:, first : first + (stop - start) // width].unsqueeze(2)

    def _decoded(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes.to(self.wide).unflatten(1, (scale.shape[1], -1)).mul_(scale)
