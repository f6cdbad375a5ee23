"""Accuracy and F1 in place of ``evaluate.load("glue", "mrpc")``, which is a program on the hub."""

from __future__ import annotations

from types import ModuleType
from typing import Any

AFTER = "evaluate"


class Metric:
    """Collects predictions and references in batches."""

    def __init__(self) -> None:
        self.predictions: list[int] = []
        self.references: list[int] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self.predictions += [int(p) for p in predictions]
        self.references += [int(r) for r in references]

    def compute(self, *, predictions: Any = (), references: Any = ()) -> dict[str, float]:
        self.add_batch(predictions=predictions, references=references)
        pairs = list(zip(self.predictions, self.references, strict=True))
        self.predictions, self.references = [], []
        hits = sum(p == r == 1 for p, r in pairs)
        wrong = sum(p != r for p, r in pairs)
        return {"accuracy": 1 - wrong / len(pairs), "f1": 2 * hits / max(2 * hits + wrong, 1)}


def apply(evaluate: ModuleType) -> None:
    evaluate.load = lambda *args, **kwargs: Metric()
