"""Supervised fine-tuning with transformers.Trainer and LoRA, sharded: what differs from the stock Trainer is one mixin.

    torchrun --nproc_per_node 2 examples/trainer_sft.py

A small byte-level Llama learns the text of Python's standard library, all weights at first. Then adapters learn to say, after a
function's first line, the first line of its docstring. Nothing is downloaded; two CPU ranks take about two minutes.
"""

from __future__ import annotations

import argparse
import re

import torch
from peft import LoraConfig, get_peft_model
from stdlib_text import StdlibText
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from accelerate_shard import ShardTrainerMixin

PAD, CONTEXT = 256, 128
DOCUMENTED = re.compile(rb'\n( *def \w+\([^)\n]*\):\n *""")([^"\n]{12,60})')


class ShardedTrainer(ShardTrainerMixin, Trainer):
    """The Trainer, with parameters, gradients and optimizer state sharded over the ranks."""


class Windows(Dataset):  # type: ignore[type-arg]
    """Windows of [CONTEXT] bytes, spread evenly over a text."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        starts = torch.linspace(0, len(text) - CONTEXT, count, dtype=torch.float64).long()
        self.rows = text[starts[:, None] + torch.arange(CONTEXT)].long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Docstrings(Dataset):  # type: ignore[type-arg]
    """Functions' first lines, each with the first line of its docstring, which alone counts in the loss."""

    def __init__(self, text: torch.Tensor, count: int) -> None:
        self.pairs = [m.groups() for m in DOCUMENTED.finditer(text.numpy().tobytes())][:count]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        prompt, answer = (list(part) for part in self.pairs[index])
        ids = torch.tensor((prompt + answer + [10])[-CONTEXT:])
        labels = ids.clone()
        labels[: -len(answer) - 1] = -100
        short = CONTEXT - len(ids)
        padded = torch.nn.functional.pad
        return {
            "input_ids": padded(ids, (0, short), value=PAD),
            "labels": padded(labels, (0, short), value=-100),
            "attention_mask": padded(torch.ones_like(ids), (0, short)),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=80, help="of fine-tuning")
    parser.add_argument("--output", default="trainer-sft", help="a folder for both models")
    chosen = parser.parse_args()

    def arguments(name: str, steps: int, rate: float) -> TrainingArguments:
        return TrainingArguments(
            output_dir=f"{chosen.output}/{name}", max_steps=steps, learning_rate=rate, warmup_steps=10,
            per_device_train_batch_size=16, per_device_eval_batch_size=16, max_grad_norm=1.0, logging_steps=20,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip

    text = StdlibText()
    config = LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=CONTEXT, pad_token_id=PAD, bos_token_id=None, eos_token_id=10,
    )  # fmt: skip
    torch.manual_seed(0)
    trainer = ShardedTrainer(
        model=LlamaForCausalLM(config),
        args=arguments("base", chosen.pretrain_steps, 3e-3),
        train_dataset=Windows(text.train, 8192),
        eval_dataset=Windows(text.held_out, 64),
    )
    trainer.train()
    base_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # on all ranks: it gathers

    base = LlamaForCausalLM.from_pretrained(trainer.args.output_dir)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    tuner = ShardedTrainer(
        model=get_peft_model(base, lora),
        args=arguments("adapters", chosen.steps, 2e-3),
        train_dataset=Docstrings(text.train, 4096),
        eval_dataset=Docstrings(text.held_out, 64),
    )
    before = tuner.evaluate()["eval_loss"]
    tuner.train()
    after = tuner.evaluate()["eval_loss"]
    tuner.save_model()
    if tuner.is_world_process_zero():
        print(f"held-out text: {base_loss:.4f} nats per byte")
        print(f"held-out docstrings: {before:.4f} nats per byte before, {after:.4f} after")


if __name__ == "__main__":
    main()
