"""Evaluation, prediction and generation by a Trainer, before, during and after training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Trainer

from tests.accelerate.support.trainers import Ours, OursSeq2Seq, Tokens, assert_same_logs, trained, trainer
from tests.support.hf_models import VOCAB, build
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError


def _evaluated(kind: type[Trainer], folder: Any) -> list[Any]:
    with trainer(kind, folder, eval_strategy="steps", eval_steps=3) as own:
        own.train()
        found = own.predict(Tokens(5, seed=9))
        return [own.evaluate()["eval_loss"], found.predictions, found.label_ids, found.metrics["test_loss"]]


@ranks(2)
def test_evaluation_and_prediction_after_training_give_the_stock_numbers(tmp_path):
    torch.testing.assert_close(_evaluated(Ours, tmp_path), _evaluated(Trainer, tmp_path), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@ranks(2)
def test_a_model_that_was_evaluated_first_is_trained_all_the_same(tmp_path):
    # The stock Trainer does not wrap it any more, and its ranks drift apart, so that is no reference here.
    with trainer(Ours, tmp_path) as own, torch.no_grad():
        before = own.evaluate()["eval_loss"]
        assert own.predict(Tokens(5, seed=9)).predictions.shape[0] == 5
        with torch.enable_grad():
            own.train()
        logs = own.steps.logs[1:]
    assert_same_logs(logs, trained(Trainer, tmp_path))
    with trainer(Trainer, tmp_path) as stock:
        torch.testing.assert_close(before, stock.evaluate()["eval_loss"], rtol=1e-5, atol=0)


@pytest.mark.exhaustive
@ranks(2)
def test_evaluation_in_bf16_converts_the_model_before_it_is_sharded(tmp_path):
    def losses(kind: type[Trainer]) -> list[float]:
        with trainer(kind, tmp_path, bf16_full_eval=True) as own:
            return [own.evaluate()["eval_loss"] for _ in range(2)]

    assert losses(Ours) == losses(Trainer)
    with trainer(Ours, tmp_path, bf16_full_eval=True, max_steps=1) as own:
        own.train()
        with pytest.raises(ConfigError, match="bf16_full_eval"):
            own.evaluate()


# -- generation -------------------------------------------------------------------------------------------------------
class Pairs(Tokens):
    """`size` rows of inputs and labels, of random lengths."""

    def __init__(self, size: int = 9, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(3, VOCAB, (3 + i % 4,), generator=generator) for i in range(2 * size)]
        self.rows = [{"input_ids": tokens[2 * i], "labels": tokens[2 * i + 1]} for i in range(size)]


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad_sequence([row["labels"] for row in rows], batch_first=True, padding_value=-100),
    }


def _generated(kind: type[Trainer], name: str, folder: Any) -> tuple[list[Any], list[dict[str, float]]]:
    model: Any = build(name)[0]
    model.generation_config.eos_token_id = list(range(3, 30, 2))  # some rows end early, so that ranks do
    options = {"predict_with_generate": True, "generation_max_length": 12, "eval_strategy": "epoch"}
    data = {"train": Pairs(), "evaluate": Pairs(7, seed=5), "options": {"data_collator": _padded}}
    with trainer(kind, folder, model, **data, **options) as own:
        own.train()
        greedy = own.predict(Pairs(7, seed=6))
        beams = own.predict(Pairs(7, seed=6), max_new_tokens=5, num_beams=2)
        return [greedy.predictions, greedy.metrics["test_loss"], beams.predictions], own.steps.logs


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.exhaustive)])
@ranks(2)
def test_prediction_generates_the_stock_text_where_ranks_end_at_different_tokens(name, tmp_path):
    ours, own_logs = _generated(OursSeq2Seq, name, tmp_path)
    stock, logs = _generated(Seq2SeqTrainer, name, tmp_path)
    torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
    assert_same_logs(own_logs, logs)
