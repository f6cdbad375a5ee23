"""A program for torch's FullyShardedDataParallel, run by either package: only the import differs.

torchrun --nproc-per-node 2 examples/fsdp.py [--package torch.distributed.fsdp] [--steps 20] [--save gpt.pt]
"""

import argparse
import functools
import importlib

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS, Block
from stdlib_text import StdlibText

parser = argparse.ArgumentParser()
parser.add_argument("--package", default="torch_shard.fsdp", help="or torch.distributed.fsdp")
parser.add_argument("--preset", choices=PRESETS, default="tiny")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save", help="write the whole model's state dict at the end (torch's own package can't on CPUs)")
args = parser.parse_args()

fsdp = importlib.import_module(args.package)  # from torch_shard import fsdp
wrap = importlib.import_module(f"{args.package}.wrap")
FSDP = fsdp.FullyShardedDataParallel

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if device.type == "cuda":
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
dist.init_process_group()
rank = dist.get_rank()
say = print if rank == 0 else (lambda *_: None)

text = StdlibText()
torch.manual_seed(0)
policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block})
model = FSDP(
    GPT(PRESETS[args.preset]),
    auto_wrap_policy=policy,
    sharding_strategy=fsdp.ShardingStrategy.FULL_SHARD,
    use_orig_params=True,
    device_id=device,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    tokens, targets = text.batch(step, rank, 8, model.module.config.context)
    loss = model(tokens.to(device), targets.to(device))
    loss.backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    say(f"step {step + 1}: loss {loss.item():.4f}, norm {norm.item():.4f}")

if args.save:
    config = fsdp.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, fsdp.StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if rank == 0:
        torch.save(state, args.save)
    dist.barrier()
dist.destroy_process_group()
