"""litgpt's commands. They name strategies that shard, and one that needs GPUs: under DDP, DDPStrategy takes their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import Program, Switch
from .support.sources import Packaged

LITGPT = Packaged("litgpt", module="litgpt")
LIGHTNING = Switch("-m lightning_shard", (), ("-m", "lightning_shard"), ddp_stand_ins=["fsdp_as_ddp"])
_CONFIG = {
    "name": "tiny", "block_size": 64, "vocab_size": 64, "padding_multiple": 64, "n_layer": 2, "n_head": 2, "n_embd": 32,
    "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64, "bias": False, "rotary_percentage": 1.0,
    "parallel_residual": False,
}  # fmt: skip
_SGD = '--optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}'

# With the strategy that it names it checkpoints its layers without the random state, so that backward has another dropout than
# forward. Under DDP it does not.
_NO_DROPOUT = "--lora_dropout=0"


def texts(folder: Path) -> None:
    makers.language_model(folder / "tokenizer")
    for number in range(4):
        path = folder / f"work/texts/{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words(number, 2000))


def pretrained(folder: Path) -> None:
    """Make a checkpoint of litgpt, and instructions."""
    import torch
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    makers.language_model(folder / "tiny")
    torch.manual_seed(6)
    config = Config(**_CONFIG)
    model = GPT(config)
    torch.save(model.state_dict(), folder / "tiny/lit_model.pth")
    save_config(config, folder / "tiny")
    for split, count in (("train", 24), ("val", 8)):
        found = [{"instruction": words(n, 4), "input": "", "output": words(n + 99, 6)} for n in range(count)]
        makers.json_file(folder / f"instructions/{split}.json", found)


def finetune(kind: str, *more: str) -> tuple[str, ...]:
    return (
        f"finetune_{kind}", "{data}/tiny", "--out_dir=out", "--precision=32-true", "--devices=2", "--data=JSON",
        "--data.json_path={data}/instructions", "--data.num_workers=0", "--data.prompt_style=alpaca",
        "--train.global_batch_size=8", "--train.micro_batch_size=2", "--train.epochs=2", "--train.lr_warmup_steps=1",
        "--train.save_interval=2", "--eval.interval=2", "--eval.max_new_tokens=4", "--eval.max_iters=2",
        "--eval.final_validation=true", _SGD, *more,
    )  # fmt: skip


PROGRAMS = [
    Program(
        "litgpt pretrain, compiled, accumulating, checkpoints",
        LITGPT,
        (
            "pretrain", "pythia-14m", *(f"--model_config.{name}={value}" for name, value in _CONFIG.items()),
            "--out_dir=out", "--precision=32-true", "--devices=2", "--data=TextFiles", "--data.train_data_path=texts",
            "--data.num_workers=0", "--tokenizer_dir={data}/tokenizer", "--train.global_batch_size=8",
            "--train.micro_batch_size=2", "--train.max_tokens=2000", "--train.lr_warmup_steps=2", "--train.save_interval=2",
            "--eval.interval=2", "--eval.max_iters=2",
        ),
        LIGHTNING,
        prepare=texts,
    ),
    Program("litgpt finetune_full, checkpointed activations", LITGPT, finetune("full"), LIGHTNING, prepare=pretrained),
    Program(
        "litgpt finetune_lora, a text generated on rank 0",
        LITGPT,
        finetune("lora", _NO_DROPOUT),
        LIGHTNING,
        prepare=pretrained,
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
