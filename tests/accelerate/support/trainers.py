"""What the tests of the Trainer share: tiny data and models, and one run to compare between the stock Trainer and ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback, TrainingArguments

from accelerate_shard.trainer.mixin import ShardTrainerMixin
from tests.accelerate.support.accelerators import clean_state
from tests.support.hf_models import VOCAB, build

LENGTH = 10


class Ours(ShardTrainerMixin, Trainer):
    """The stock Trainer, sharding."""


class Tokens(torch.utils.data.Dataset):
    """`size` rows of random tokens, of different numbers of labels, the same on all ranks."""

    def __init__(self, size: int = 24, seed: int = 3, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for i in range(size):
            ids = torch.randint(3, VOCAB, (length,), generator=generator)
            labels = ids.clone()
            labels[: i % 4] = -100  # so that ranks count different numbers of labels
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


class Steps(TrainerCallback):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        kept = {k: v for k, v in logs.items() if k in ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss")}
        self.logs.append({**kept, "step": state.global_step})


@contextlib.contextmanager
def trainer(
    kind: type[Trainer],
    folder: Any,
    /,
    model: Any = "gpt2",
    *,
    train: Any = None,
    evaluate: Any = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> Iterator[Any]:
    """A Trainer of class `kind` on the CPU, with ``trainer.steps`` (:class:`Steps`). Accelerate is clean before and after.

    Args:
        folder: its ``output_dir``, shared by the ranks.
        model: a name of :mod:`tests.support.hf_models`, or a model.
        options: of the Trainer.
        arguments: of TrainingArguments.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True,
        "logging_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "learning_rate": 0.05,
        "optim": "sgd", "num_train_epochs": 1, "lr_scheduler_type": "linear",
    }  # fmt: skip
    with clean_state():
        made = build(model)[0] if isinstance(model, str) else model
        steps = Steps()
        seq2seq = issubclass(kind, Seq2SeqTrainer)
        args = (Seq2SeqTrainingArguments if seq2seq else TrainingArguments)(**{**defaults, **arguments})
        found = kind(
            model=made,
            args=args,
            train_dataset=Tokens() if train is None else train,
            eval_dataset=Tokens(10, seed=4) if evaluate is None else evaluate,
            **{"callbacks": [steps], **(options or {})},
        )
        found.steps = steps
        yield found


def trained(kind: type[Trainer], folder: Any, /, model: Any = "gpt2", **arguments: Any) -> list[dict[str, float]]:
    """What a whole training logs. Collective."""
    with trainer(kind, folder, model, **arguments) as found:
        found.train()
        return found.steps.logs


def assert_same_logs(found: list[dict[str, float]], wanted: list[dict[str, float]], rtol: float = 1e-5) -> None:
    """Every logged number agrees to `rtol`."""
    assert len(found) == len(wanted) > 1
    for own, other in zip(found, wanted, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            torch.testing.assert_close(
                own[key], value, rtol=rtol, atol=1e-12, msg=lambda m, k=key, o=other: f"{k} {o}: {m}"
            )
