"""Muon for the matrices, AdamW for everything else: each matrix is stepped whole, on the rank that owns it.

torchrun --nproc-per-node 2 examples/muon.py [--steps 150] [--save muon.pt] [--resume muon.pt]
"""

import argparse
import time

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS
from stdlib_text import StdlibText

import torch_shard

parser = argparse.ArgumentParser()
parser.add_argument("--preset", choices=PRESETS, default="tiny")
parser.add_argument("--steps", type=int, default=150)
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
engine = torch_shard.shard(model)

# As Muon's authors use it: the blocks' matrices; not embeddings and head, which are tables, nor norms and biases.
named = list(model.named_parameters())
matrices = [p for name, p in named if p.ndim == 2 and name.startswith("blocks.")]
others = [p for name, p in named if p.ndim != 2 or not name.startswith("blocks.")]
muon = torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
adamw = torch.optim.AdamW(others, lr=3e-3)
optimizers = {"muon": muon, "adamw": adamw}
warm_up = {name: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=20) for name, o in optimizers.items()}
first = 0
if args.resume:
    saved = torch.load(args.resume, map_location="cpu", weights_only=True)
    first = saved["step"]
    engine.load_state_dict(saved["model"])
    for name, optimizer in optimizers.items():
        engine.load_optim_state_dict(optimizer, saved[name])
        warm_up[name].load_state_dict(saved["warm_up"][name])

context = model.config.context
began = time.perf_counter()
for step in range(first, args.steps):
    for optimizer in optimizers.values():
        optimizer.zero_grad()
    tokens, targets = text.batch(step, rank, per_rank, context)
    loss = model(tokens.to(device), targets.to(device))
    loss.backward()
    engine.clip_grad_norm_(1.0)
    for name, optimizer in optimizers.items():
        optimizer.step()
        warm_up[name].step()
    if (step + 1) % 10 == 0:
        speed = (step + 1 - first) * per_rank * world * context / (time.perf_counter() - began)
        say(f"step {step + 1}: loss {loss.item():.3f} nats per byte, {speed:,.0f} tokens/s")

# Momentum is where its matrix is stepped: each rank has that of the matrices it owns, and about the same number of bytes.
owned = [None] * world
dist.all_gather_object(owned, (len(muon.state), engine.memory_summary(muon)["optimizer"] / 2**20))
for r, (count, size) in enumerate(owned):
    say(f"rank {r} owns {count} of {len(matrices)} matrices, {size:.2f} MiB of momentum")

with torch.no_grad():
    tokens, targets = text.held_out_windows(64, context)
    say(f"held-out loss {model(tokens.to(device), targets.to(device)).item():.3f} nats per byte")
if args.save:  # collective; rank 0 has the result
    state = {name: engine.optim_state_dict(optimizer) for name, optimizer in optimizers.items()}
    state.update(model=engine.state_dict(), warm_up={name: s.state_dict() for name, s in warm_up.items()})
    if rank == 0:
        torch.save({**state, "step": args.steps}, args.save)
    dist.barrier()  # however long that took
dist.destroy_process_group()
