"""The programs that trl brings: ``trl/scripts``. They use subclasses of transformers.Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program
from .support.sources import Packaged


def texts(folder: Path) -> None:
    makers.language_model(folder / "model")
    for split, count in (("train", 24), ("test", 8)):
        makers.rows(folder / f"chat/{split}.jsonl", [{"text": words(n)} for n in range(count)])


def pairs(folder: Path) -> None:
    makers.language_model(folder / "model")
    makers.language_model(folder / "scorer", labels=1)
    for split, count in (("train", 24), ("test", 8)):
        found = [{"prompt": words(n), "chosen": words(n + 99, 4), "rejected": words(n + 199, 5)} for n in range(count)]
        makers.rows(folder / f"chat/{split}.jsonl", found)


def judged(folder: Path) -> None:
    makers.language_model(folder / "model")
    found = [{"prompt": words(n), "completion": words(n + 99, 4), "label": n % 2 == 0} for n in range(24)]
    makers.rows(folder / "chat/train.jsonl", found)


def prompts(folder: Path) -> None:
    makers.language_model(folder / "model")
    makers.rows(folder / "chat/train.jsonl", [{"prompt": words(n, 4)} for n in range(24)])
    (folder / "work").mkdir()
    (folder / "work" / "rewards.py").write_text(
        "def many_of_one(completions, **kwargs):\n    return [float(c.count('1')) for c in completions]\n"
    )


def arguments(*more: str, model: str = "model") -> Sequence[str]:
    return (
        f"--model_name_or_path={{data}}/{model}", "--dataset_name={data}/chat", "--output_dir=out", "--max_steps=4",
        "--per_device_train_batch_size=2", "--logging_steps=1", "--save_steps=2", "--learning_rate=1e-3", "--report_to=none",
        "--use_cpu=true", "--bf16=false", "--gradient_checkpointing=false", *more,
    )  # fmt: skip


SGD = "--optim=sgd"
PROGRAMS = [
    Program("trl sft", Packaged("trl", "scripts/sft.py"), arguments(SGD), ACCELERATE, prepare=texts),
    Program(
        "trl sft, evaluated, accumulating, gradients checkpointed, then resumed",
        Packaged("trl", "scripts/sft.py"),
        arguments("--eval_strategy=steps", "--eval_steps=2", "--gradient_accumulation_steps=2"),
        ACCELERATE,
        then=[arguments("--max_steps=6", "--gradient_accumulation_steps=2", "--resume_from_checkpoint=out/checkpoint-4")],
        prepare=texts,
    ),
    Program(
        "trl sft with LoRA",
        Packaged("trl", "scripts/sft.py"),
        arguments("--use_peft", "--lora_r=2", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout=0"),
        ACCELERATE,
        prepare=texts,
    ),
    Program("trl dpo", Packaged("trl", "scripts/dpo.py"), arguments(SGD), ACCELERATE, prepare=pairs),
    Program("trl kto", Packaged("trl", "scripts/kto.py"), arguments(SGD), ACCELERATE, prepare=judged),
    Program("trl reward", Packaged("trl", "scripts/reward.py"), arguments(SGD, model="scorer"), ACCELERATE, prepare=pairs),
    Program(
        "trl grpo",
        Packaged("trl", "scripts/grpo.py"),
        arguments(SGD, "--reward_funcs=rewards.many_of_one", "--num_generations=2", "--max_completion_length=6"),
        ACCELERATE,
        prepare=prompts,
    ),
    Program(
        "trl rloo",
        Packaged("trl", "scripts/rloo.py"),
        arguments(SGD, "--reward_funcs=rewards.many_of_one", "--num_generations=2", "--max_completion_length=6"),
        ACCELERATE,
        prepare=prompts,
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
