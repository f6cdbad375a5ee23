"""Where memory runs out in the arithmetic of an optimizer's step, Lightning's error says what holds it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.lightning.fabric.support import batch, fabric, net
from tests.lightning.support import Net, fitted
from tests.support.ranks import ranks

SAYS = r"can't allocate(.|\n)*rank \d: memory has run out in the optimizer's step\. This rank holds"


def fail(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("can't allocate")


@ranks(2)
def test_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
    with pytest.raises(torch.OutOfMemoryError, match=SAYS):
        fitted(Module())


@ranks(2)
def test_of_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric_ = fabric()
    module = net()
    model, optimizer = fabric_.setup(module, torch.optim.SGD(module.parameters(), 0.1))
    fabric_.backward(model(batch(0)[0]).sum())
    monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", fail)
    with pytest.raises(torch.OutOfMemoryError, match=SAYS):
        optimizer.step()
