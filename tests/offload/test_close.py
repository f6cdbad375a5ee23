"""``engine.close()`` while the host still steps."""

from __future__ import annotations

import pytest
from torch import nn

from tests.offload.models import Training, same
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


@pytest.mark.parametrize("optimizer", ["SGD", *exhaustive("AdamW")])
@ranks(2, exhaustive=(1,))
def test_a_model_that_is_closed_right_behind_a_step_has_that_steps_weights(rank, optimizer):
    states = []
    for offload in (None, "cpu"):
        training = Training(rank, offload, optimizer)
        for number in range(4):
            training.step(number)
        training.engine.close(training.optimizer)
        assert all(type(p) is nn.Parameter for p in training.model.parameters())
        states.append(dict(training.model.state_dict()))
    same(*states)
