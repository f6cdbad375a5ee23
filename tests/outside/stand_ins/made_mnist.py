"""Random images of digits in place of those that ``torchvision.datasets.MNIST`` downloads: as many, of the same size.

The variable MADE_MNIST says how many there are for training, for programs that have no other way to take fewer.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

AFTER = "torchvision.datasets"


def apply(datasets: ModuleType) -> None:
    import torch

    base = datasets.MNIST

    class MNIST(base):  # type: ignore[valid-type, misc]
        """Reads and writes no files."""

        def __init__(
            self,
            root: Any,
            train: bool = True,
            transform: Any = None,
            target_transform: Any = None,
            download: bool = False,
        ) -> None:
            super(base, self).__init__(root, transform=transform, target_transform=target_transform)
            self.train = train
            count = int(os.environ.get("MADE_MNIST", 60_000)) // (1 if train else 6)
            draw = torch.Generator().manual_seed(int(train))
            self.targets = torch.randint(0, 10, (count,), generator=draw)
            self.data = torch.randint(0, 256, (count, 28, 28), generator=draw, dtype=torch.uint8)
            for digit in range(10):  # each has a row of its own that is bright, so that there is something to learn
                self.data[self.targets == digit, 2 * digit + 4] = 255

    datasets.MNIST = MNIST
