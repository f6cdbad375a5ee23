"""Sharded training in plain torch: a byte-level GPT on the text of Python's standard library.

torchrun --nproc-per-node 2 examples/raw_torch.py [--steps 500] [--save gpt.pt] [--resume gpt.pt]
"""

import argparse
import math
import time

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS
from stdlib_text import StdlibText, bigram_loss

import torch_shard

parser = argparse.ArgumentParser()
parser.add_argument("--preset", choices=PRESETS, default="tiny")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--save", help="write one plain torch.save file at the end")
parser.add_argument("--resume", help="continue from such a file, on any number of ranks")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
per_rank = -(-16 // world)  # windows; 16 a step, whatever the number of ranks
say = print if rank == 0 else (lambda *_: None)

text = StdlibText()
torch.manual_seed(0)
model = GPT(PRESETS[args.preset]).to(device)
engine = torch_shard.shard(model)  # the one line that DDP would have here too
say(engine.plan.table())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(  # a tenth of the steps is warm-up
    optimizer, lambda s: min(10 * (s + 1) / args.steps, 0.55 + 0.45 * math.cos(math.pi * s / args.steps))
)
if args.resume:
    saved = torch.load(args.resume, map_location="cpu", weights_only=True)
    engine.load_state_dict(saved["model"])
    engine.load_optim_state_dict(optimizer, saved["optimizer"])
    schedule.load_state_dict(saved["schedule"])

context = model.config.context
first, began = schedule.last_epoch, time.perf_counter()  # the steps taken so far, and the time
for step in range(first, args.steps):
    optimizer.zero_grad()  # not after the step: what follows the loop counts the last gradients
    tokens, targets = text.batch(step, rank, per_rank, context)
    loss = model(tokens.to(device), targets.to(device))
    loss.backward()
    engine.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    if (step + 1) % 50 == 0:
        speed = (step + 1 - first) * per_rank * world * context / (time.perf_counter() - began)
        say(f"step {step + 1}: loss {loss.item():.3f} nats per byte, {speed:,.0f} tokens/s")

whole = sum(p.numel() * p.element_size() for p in model.parameters())
ddp = {"parameters": whole, "gradients": whole, "optimizer": 2 * whole}  # bytes; AdamW has two moments
held = [None] * world
dist.all_gather_object(held, engine.memory_summary(optimizer))
for r, mine in enumerate(held):
    say(f"rank {r}, MiB held/under DDP:", *(f"{k} {mine[k] / 2**20:.2f}/{ddp[k] / 2**20:.2f}" for k in ddp))

with torch.no_grad():
    tokens, targets = text.held_out_windows(64, context)
    held_out = model(tokens.to(device), targets.to(device)).item()
say(f"held-out loss {held_out:.3f} nats per byte, byte bigram {bigram_loss(text.bigram, tokens, targets):.3f}")
if args.save:  # both calls are collective; rank 0 has the result
    state = {"model": engine.state_dict(), "optimizer": engine.optim_state_dict(optimizer)}
    if rank == 0:
        torch.save({**state, "schedule": schedule.state_dict()}, args.save)
    dist.barrier()  # however long that took: what follows gathers, and waits 30 s for rank 0
prompt = torch.tensor([list(b"def ")], device=device)
say(bytes(model.generate(prompt, 200)[0].tolist()).decode(errors="replace"))
dist.destroy_process_group()
