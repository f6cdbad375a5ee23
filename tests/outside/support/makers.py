"""Data and pretrained models that are made on the spot, tiny ones."""

from __future__ import annotations

import json
from pathlib import Path

import torch

__all__ = ["images"]


def images(folder: Path, count: int, size: int = 32, captions: bool = False) -> None:
    """Write `count` PNG files of random pixels, with a ``metadata.jsonl`` of captions if asked for."""
    from PIL import Image

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(7)
    lines = []
    for number in range(count):
        pixels = torch.randint(0, 256, (size, size, 3), generator=draw, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{number:03}.png")
        lines.append(json.dumps({"file_name": f"{number:03}.png", "text": f"w{number % 5} w{number % 7 + 5}"}))
    if captions:
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
