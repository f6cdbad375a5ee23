"""trl's SFTTrainer with the mixin logs what it logs with DistributedDataParallel. Only where trl is installed."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate_shard.trainer.mixin import ShardTrainerMixin
from tests.accelerate.support.accelerators import clean_state
from tests.accelerate.support.trainers import Steps, Tokens, assert_same_logs
from tests.support.hf_models import VOCAB, build
from tests.support.ranks import ranks

pytest.importorskip("trl")


def _tuned(shard: bool, folder: Any, adapters: bool) -> list[dict[str, float]]:
    import datasets
    import peft
    import pyarrow
    import trl
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    kind = type("Tuner", (ShardTrainerMixin, trl.SFTTrainer), {}) if shard else trl.SFTTrainer
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    # With a fingerprint of its own: computing one takes versions of dill and pyarrow that fit each other.
    rows = datasets.Dataset(
        pyarrow.Table.from_pylist([{k: v.tolist() for k, v in row.items()} for row in Tokens().rows]), fingerprint="1"
    )
    steps = Steps()
    with clean_state():
        args = trl.SFTConfig(
            output_dir=str(folder), use_cpu=True, report_to=[], save_strategy="steps", save_steps=3, disable_tqdm=True,
            logging_steps=1, per_device_train_batch_size=2, learning_rate=0.05, optim="sgd", num_train_epochs=1, bf16=False,
            dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False,
            gradient_checkpointing=True,
        )  # fmt: skip
        tuner = kind(
            model=build("llama")[0],
            args=args,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[steps],
            peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if adapters else None,
        )
        tuner.train()
    return steps.logs


@pytest.mark.exhaustive
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "LoRA"])
@ranks(2)
def test_sft_logs_what_it_logs_unsharded(adapters, tmp_path):
    assert_same_logs(_tuned(True, tmp_path / "ours", adapters), _tuned(False, tmp_path / "stock", adapters))
