"""A byte-level GPT on the text of Python's standard library, trained as any script for Hugging Face Accelerate is written.

The import of Accelerator is all that is different from a script that trains under DistributedDataParallel. On GPUs:

    accelerate launch --num_processes 2 examples/accelerate_lm.py
    torchrun --nproc-per-node 2 examples/accelerate_lm.py

and on the CPU with ACCELERATE_USE_CPU=true, of which `accelerate launch` needs

    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 \
        examples/accelerate_lm.py [--steps 500] [--accumulate 2] [--mixed-precision bf16] [--save DIR] [--resume DIR]
"""

import argparse
import math
import time

import torch
from accelerate.utils import set_seed
from gpt import GPT, PRESETS
from stdlib_text import StdlibText, bigram_loss
from torch.utils.data import DataLoader, Dataset

from accelerate_shard import Accelerator  # the line that differs: from accelerate import Accelerator


class Windows(Dataset):
    """Pieces of the training text, each with the bytes that follow: int64 [context] twice."""

    def __init__(self, text: StdlibText, count: int, context: int) -> None:
        self.text, self.count, self.context = text, count, context

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = self.text.batch(index, 0, 1, self.context)
        return tokens[0], targets[0]


parser = argparse.ArgumentParser()
parser.add_argument("--preset", choices=PRESETS, default="tiny")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), default="no")
parser.add_argument("--save", help="a folder for all that resuming needs")
parser.add_argument("--resume", help="such a folder")
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulate)
set_seed(0)
text = StdlibText()
model = GPT(PRESETS[args.preset])
context = model.config.context
per_rank = max(1, 16 // (accelerator.num_processes * args.accumulate))  # windows
examples = args.steps * args.accumulate * accelerator.num_processes * per_rank
data = DataLoader(Windows(text, examples, context), batch_size=per_rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
total = args.steps * accelerator.num_processes  # Accelerate steps schedules once for each process
schedule = torch.optim.lr_scheduler.LambdaLR(  # a tenth of the steps is warm-up
    optimizer, lambda s: min(10 * (s + 1) / total, 0.55 + 0.45 * math.cos(math.pi * s / total))
)
model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)

first = 0  # the steps taken so far
if args.resume:
    accelerator.load_state(args.resume)
    first = schedule.scheduler.last_epoch // accelerator.num_processes

began, step = time.perf_counter(), first
for tokens, targets in accelerator.skip_first_batches(data, first * args.accumulate):
    with accelerator.accumulate(model):
        loss = model(tokens, targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        if step % 50 == 0 or step == args.steps:
            mean = accelerator.gather(loss.detach()).mean().item()
            speed = (step - first) * examples // args.steps * context / (time.perf_counter() - began)
            accelerator.print(f"step {step}: loss {mean:.4f} nats per byte, norm {norm:.4f}, {speed:,.0f} tokens/s")

model.eval()
with torch.no_grad():
    tokens, targets = text.held_out_windows(64, context)
    held_out = model(tokens.to(accelerator.device), targets.to(accelerator.device)).item()
bigram = bigram_loss(text.bigram, tokens, targets)
accelerator.print(f"held-out loss {held_out:.3f} nats per byte, byte bigram {bigram:.3f}")
if args.save:
    accelerator.save_state(args.save)
    accelerator.save_model(model, f"{args.save}/model")  # safetensors, for use elsewhere
prompt = torch.tensor([list(b"def ")], device=accelerator.device)
written = accelerator.unwrap_model(model).generate(prompt, 100)[0].tolist()
accelerator.print(bytes(written).decode(errors="replace"))
accelerator.end_training()
