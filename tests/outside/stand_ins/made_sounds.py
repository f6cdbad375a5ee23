"""Noise in place of what ``torchaudio.load`` reads, another one for each path; ``torchaudio.save`` writes WAV with floats.

Both would need torchcodec and FFmpeg.
"""

from __future__ import annotations

import zlib
from types import ModuleType
from typing import Any

AFTER = "torchaudio"


def apply(torchaudio: ModuleType) -> None:
    import torch

    def load(path: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, int]:
        number = zlib.crc32(str(path).encode())
        draw = torch.Generator().manual_seed(number)
        return torch.rand(1, 12_000 + number % 8_000, generator=draw) - 0.5, 24_000

    def save(path: Any, samples: torch.Tensor, rate: int, *args: Any, **kwargs: Any) -> None:
        import scipy.io.wavfile

        scipy.io.wavfile.write(path, rate, samples.float().T.numpy())

    torchaudio.load, torchaudio.save = load, save
