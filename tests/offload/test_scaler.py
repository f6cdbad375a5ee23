"""A GradScaler with gradients in host memory: what is clipped are the unscaled gradients."""

from __future__ import annotations

import pytest
import torch

from tests.offload.models import Training, inputs, loss_of, same
from tests.support.ranks import ranks


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_unscaled_gradients_are_clipped_as_without(rank, accumulate):
    """The norm that was taken while they moved is that of the scaled ones."""
    found = []
    for offload in (None, "cpu"):
        training, norms = Training(rank, offload, "SGD"), []
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(4):
            for micro in range(accumulate):
                loss = loss_of(training.model, inputs(rank, 10 * step + micro)) / accumulate
                if step == 2 and rank == 1:
                    loss = loss * float("inf")  # all ranks skip this step
                scaler.scale(loss).backward()
            scaler.unscale_(training.optimizer)
            norms.append(training.engine.clip_grad_norm_(0.5))
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        found.append((norms, scaler.get_scale(), training.state()))
    (norms, scale, state), (others, other_scale, other_state) = found
    torch.testing.assert_close(torch.stack(others), torch.stack(norms), equal_nan=True, rtol=1e-6, atol=0.0)
    assert norms[0] > 0.5 and not norms[2].isfinite()
    assert scale == other_scale == 64.0 * 2 / 2
    same(state[0], other_state[0])
