"""Random pictures in place of those that ``torchvision.datasets.CelebA`` downloads: as many as the variable MADE_FACES says."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

AFTER = "torchvision.datasets"


def apply(datasets: ModuleType) -> None:
    import torch
    from PIL import Image

    class CelebA(torch.utils.data.Dataset[Any]):
        """Reads and writes no files."""

        def __init__(self, root: Any, transform: Any, **settings: Any) -> None:
            self.transform = transform
            draw = torch.Generator().manual_seed(0)
            count = int(os.environ["MADE_FACES"])
            self.data = torch.randint(0, 256, (count, 64, 64, 3), generator=draw, dtype=torch.uint8)

        def __len__(self) -> int:
            return len(self.data)

        def __getitem__(self, index: int) -> Any:
            return self.transform(Image.fromarray(self.data[index].numpy())), 0

    datasets.CelebA = CelebA
