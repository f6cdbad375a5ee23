"""Training in fp16 is as with the stock Trainer."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from transformers import Trainer

import torch_shard
from tests.accelerate.support.trainers import Ours, trainer
from tests.support.ranks import ranks


@pytest.mark.exhaustive
@ranks(2)
def test_with_fp16_steps_are_scaled_and_skipped_as_by_the_stock_trainer(tmp_path, rank):
    def outcome(kind: type[Trainer]) -> tuple[list[dict[str, float]], list[float]]:
        class Half(kind):  # type: ignore[misc,valid-type]
            """Computes in fp16 on the CPU, where Accelerate takes it on GPUs only; one rank's third loss is too large."""

            scales: ClassVar[list[float]] = []

            def create_accelerator_and_postprocess(self) -> None:
                super().create_accelerator_and_postprocess()
                self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
                self.accelerator.native_amp = True

            def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
                self.scales.append(self.accelerator.scaler.get_scale())
                loss = super().compute_loss(*args, **kwargs)
                return loss * 1e9 if len(self.scales) == 3 and rank == 1 else loss

        with trainer(Half, tmp_path, fp16=True, max_grad_norm=0.5) as own:
            own.train()
            assert torch_shard.engine_of(own.model) is not None or kind is Trainer
            return own.steps.logs, own.scales

    (logs, scales), (wanted, wanted_scales) = outcome(Ours), outcome(Trainer)
    assert scales == wanted_scales == [1024.0, 1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    for own, other in zip(logs, wanted, strict=True):
        finite = {key: value for key, value in other.items() if value < 1e6}  # not of the step that is skipped
        assert {key: own[key] for key in finite} == pytest.approx(finite, rel=3e-3)
