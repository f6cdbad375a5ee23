"""The behaviour applied to ``transformers.Trainer`` itself, so that scripts need not change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from transformers import Seq2SeqTrainer, Trainer

import torch_shard
from accelerate_shard.trainer.mixin import STEPS, apply_to_trainer, remove_from_trainer
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError


@contextlib.contextmanager
def applied() -> Iterator[None]:
    apply_to_trainer()
    try:
        yield
    finally:
        remove_from_trainer()


class Own(Trainer):
    """A user's subclass."""


@ranks(2)
def test_the_trainer_and_its_subclasses_with_the_mixin_and_without_shard_and_log_the_same_numbers(tmp_path):
    with applied():
        for kind in (Own, Seq2SeqTrainer, Ours):
            with trainer(kind, tmp_path, max_steps=1) as own:
                own.train()
                assert torch_shard.engine_of(own.model) is not None
        logs = trained(Trainer, tmp_path / "applied", save_strategy="steps", save_steps=3)
        with trainer(Trainer, tmp_path / "applied") as own:
            own.train(resume_from_checkpoint=str(tmp_path / "applied" / "checkpoint-3"))
            assert_same_logs(own.steps.logs[:-1], logs[3:-1])
    assert_same_logs(logs, trained(Trainer, tmp_path))


def test_it_is_undone():
    before = {name: Trainer.__dict__[name] for name in STEPS}
    with applied():
        apply_to_trainer()  # once more changes nothing
        assert all(Trainer.__dict__[name] is not before[name] for name in STEPS)
    assert {name: Trainer.__dict__[name] for name in STEPS} == before
    remove_from_trainer()  # nor does this


def test_what_was_put_over_it_is_undone_first(monkeypatch):
    with applied():
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "_save", lambda *args: None)
            with pytest.raises(ConfigError, match="_save was replaced"):
                remove_from_trainer()
        assert hasattr(Trainer._save, "_torch_shard_own")
