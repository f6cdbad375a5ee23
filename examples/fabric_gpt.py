"""Sharded training in Lightning Fabric: a byte-level GPT on the text of Python's standard library.

python examples/fabric_gpt.py [--devices 2] [--strategy shard] [--steps 500] [--save gpt.ckpt] [--resume gpt.ckpt]
"""

import argparse
import math
import time

import torch
from gpt import GPT, PRESETS
from lightning.fabric import Fabric
from stdlib_text import StdlibText, bigram_loss

parser = argparse.ArgumentParser()
parser.add_argument("--preset", choices=PRESETS, default="tiny")
parser.add_argument("--strategy", default="shard", help="or ddp, to compare")
parser.add_argument("--devices", default="auto" if torch.cuda.is_available() else 2)
parser.add_argument("--precision", default="32-true")
parser.add_argument("--accumulate", type=int, default=1, help="backwards in a step")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--save", help="write one file at the end")
parser.add_argument("--resume", help="continue from such a file, on any number of ranks")
args = parser.parse_args()

fabric = Fabric(strategy=args.strategy, devices=args.devices, precision=args.precision)
fabric.launch()
fabric.seed_everything(0, verbose=False)
with fabric.init_module():
    model = GPT(PRESETS[args.preset])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
model, optimizer = fabric.setup(model, optimizer)
model.mark_forward_method("generate")
schedule = torch.optim.lr_scheduler.LambdaLR(  # a tenth of the steps is warm-up
    optimizer, lambda s: min(10 * (s + 1) / args.steps, 0.55 + 0.45 * math.cos(math.pi * s / args.steps))
)
state = {"model": model, "optimizer": optimizer, "schedule": schedule}
if args.resume:
    fabric.load(args.resume, state)

text, context = StdlibText(), model.config.context
rank, world = fabric.global_rank, fabric.world_size
per_rank = -(-16 // (world * args.accumulate))  # windows; 16 a step, whatever the number of ranks
first, began = schedule.last_epoch, time.perf_counter()  # the steps taken so far, and the time
for step in range(first, args.steps):
    for part in range(args.accumulate):
        last = part + 1 == args.accumulate
        batch = fabric.to_device(text.batch(step * args.accumulate + part, rank, per_rank, context))
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(*batch) / args.accumulate
            fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if (step + 1) % 50 == 0 or step + 1 == args.steps:
        speed = (step + 1 - first) * 16 * context / (time.perf_counter() - began)
        mean = fabric.all_reduce(loss.detach() * args.accumulate).item()
        fabric.print(f"step {step + 1}: loss {mean:.3f} nats per byte, {speed:,.0f} tokens/s")

with torch.no_grad():
    tokens, targets = text.held_out_windows(64, context)
    held_out = model(*fabric.to_device((tokens, targets))).item()
bigram = bigram_loss(text.bigram, tokens, targets)
fabric.print(f"held-out loss {held_out:.3f} nats per byte, byte bigram {bigram:.3f}")
if args.save:
    fabric.save(args.save, state)
prompt = fabric.to_device(torch.tensor([list(b"def ")]))
fabric.print(bytes(model.generate(prompt, 200)[0].tolist()).decode(errors="replace"))
