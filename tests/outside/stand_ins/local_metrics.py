"""Metrics in place of those that ``evaluate.load`` gets from the hub, where they are programs.

There are accuracy, GLUE's metric for MRPC, and of ROUGE the F-measure of single words, without stemming.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

AFTER = "evaluate"


def _accuracy(predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    pairs = list(zip(map(int, predictions), map(int, references), strict=True))
    return {"accuracy": sum(p == r for p, r in pairs) / len(pairs)}


def _mrpc(predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    pairs = list(zip(map(int, predictions), map(int, references), strict=True))
    hits = sum(p == r == 1 for p, r in pairs)
    wrong = sum(p != r for p, r in pairs)
    return {"accuracy": 1 - wrong / len(pairs), "f1": 2 * hits / max(2 * hits + wrong, 1)}


def _rouge(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    scores = []
    for prediction, reference in zip(predictions, references, strict=True):
        found, wanted = Counter(prediction.split()), Counter(reference.split())
        scores.append(2 * (found & wanted).total() / max((found + wanted).total(), 1))
    return {"rouge1": sum(scores) / len(scores)}


_METRICS: dict[str, Callable[[Sequence[Any], Sequence[Any]], dict[str, float]]] = {
    "accuracy": _accuracy,
    "glue": _mrpc,
    "rouge": _rouge,
}


class Metric:
    """Collects predictions and references in batches."""

    def __init__(self, name: str) -> None:
        self._compute = _METRICS[name]
        self._predictions: list[Any] = []
        self._references: list[Any] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._predictions += list(predictions)
        self._references += list(references)

    def compute(self, *, predictions: Any = (), references: Any = (), **settings: Any) -> dict[str, float]:
        self.add_batch(predictions=predictions, references=references)
        found = self._compute(self._predictions, self._references)
        self._predictions, self._references = [], []
        return found


def apply(evaluate: ModuleType) -> None:
    evaluate.load = lambda path, *args, **kwargs: Metric(path)
