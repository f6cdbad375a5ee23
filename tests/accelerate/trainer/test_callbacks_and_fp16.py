"""What callbacks are called with and decide, and training in fp16, are as with the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import torch_shard
from tests.accelerate.trainer.helpers import Ours, Steps, assert_same_logs, trainer
from tests.ranks import ranks


class Events(TrainerCallback):
    """Keeps what it is called for, and saves and evaluates when it wants to."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def _note(self, name: str, state: Any, given: dict[str, Any]) -> None:
        assert given["model"] is not None
        self.seen.append((name, state.global_step))

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert given["optimizer"].param_groups and given["lr_scheduler"] is not None
        self._note("train", state, given)

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("micro-batch", state, given)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        assert any(p.grad is not None for p in given["model"].parameters())
        self._note("before the step", state, given)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("step", state, given)

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        control.should_save = state.global_step == 1
        control.should_evaluate = state.global_step == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note(f"{given['metrics']['eval_loss']:.4f}", state, given)

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("saved", state, given)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._note("end", state, given)


@ranks(2)
def test_callbacks_see_and_decide_what_they_do_with_the_stock_trainer(tmp_path):
    def outcome(kind: type[Trainer], folder: Path) -> tuple[Any, ...]:
        events, steps = Events(), Steps()
        options = {"callbacks": [steps, events]}
        with trainer(kind, folder, options=options, gradient_accumulation_steps=2) as own:
            own.train()
        dist.barrier()
        return steps.logs, events.seen, sorted(path.name for path in folder.glob("checkpoint-*"))

    logs, seen, files = outcome(Ours, tmp_path / "ours")
    wanted, wanted_seen, wanted_files = outcome(Trainer, tmp_path / "stock")
    assert_same_logs(logs, wanted)
    assert seen == wanted_seen and len(seen) == 13
    assert files == wanted_files == ["checkpoint-1"]


@pytest.mark.exhaustive
@ranks(2)
def test_training_ends_early_where_the_stock_trainers_does(tmp_path):
    def outcome(kind: type[Trainer], folder: Path) -> Any:
        steps = Steps()
        options = {"callbacks": [steps, EarlyStoppingCallback(early_stopping_patience=1)]}
        arguments = {
            "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "num_train_epochs": 3,
            "load_best_model_at_end": True, "learning_rate": 3.0, "max_grad_norm": 0.0,
        }  # fmt: skip
        with trainer(kind, folder, options=options, **arguments) as own:
            own.train()
            assert 1 < own.state.global_step < 18
            return steps.logs

    assert_same_logs(outcome(Ours, tmp_path / "ours"), outcome(Trainer, tmp_path / "stock"))


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
