"""Element-wise optimizers of torch, in each of the ways in which it computes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

O = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], O.Optimizer]] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD for-loop": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: O.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: O.Adam(p, lr=0.01, amsgrad=True),
    "AdamW for-loop": lambda p: O.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: O.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: O.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: O.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.05),
    "Adagrad fused": lambda p: O.Adagrad(p, lr=0.05, fused=True),
    "RMSprop": lambda p: O.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "RMSprop for-loop": lambda p: O.RMSprop(p, lr=0.01, foreach=False),
    "Adadelta": lambda p: O.Adadelta(p, lr=0.5),
    "Adamax": lambda p: O.Adamax(p, lr=0.01),
    "NAdam": lambda p: O.NAdam(p, lr=0.01),
    "RAdam": lambda p: O.RAdam(p, lr=0.01),
    "ASGD": lambda p: O.ASGD(p, lr=0.1),
    "Rprop": lambda p: O.Rprop(p, lr=0.01),
}
