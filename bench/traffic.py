"""Bytes that each strategy sends in a step, in all and between nodes, beside DDP, FSDP2 and FSDP2's HSDP.

    python bench/traffic.py              four Gloo ranks on this machine's CPU, taken for two nodes of two
    python bench/traffic.py --tiny       a model that takes seconds

Bytes are counted at the collectives (counting.py), so that nothing depends on the machine. "Between nodes" are those of
collectives among ranks of both nodes. Each strategy takes a step of one micro-batch, and one of four whose gradients are reduced
once (``no_sync``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from counting import CollectiveCounter
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig

# 13.7M parameters: four blocks of 3.15M between an embedding and a head of 0.5M each.
CONFIG = GPTConfig(layers=4, width=512, heads=8, context=64, vocab=1024)
TINY = GPTConfig(layers=2, width=64, heads=2, context=32, vocab=256)
RANKS, NODE = 4, 2
MICRO = 4
MIB = 2**20

OURS: dict[str, dict[str, Any]] = {
    "no_shard": {"strategy": "no_shard"},
    "shard_optim": {"strategy": "shard_optim"},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "full_shard": {"strategy": "full_shard"},
    "full_shard, reshard_after_forward=2": {"strategy": "full_shard", "reshard_after_forward": NODE},
    "hybrid_shard": {"strategy": "hybrid_shard", "shard_size": NODE},
    "hybrid_shard_zero2": {"strategy": "hybrid_shard_zero2", "shard_size": NODE},
}
ENGINES = ("DDP", "FSDP2", "FSDP2, reshard_after_forward=2", "FSDP2, 2 x 2 mesh (HSDP)", *OURS)

NoSync = Callable[[], contextlib.AbstractContextManager[Any]]


def wrap(name: str, model: GPT) -> tuple[nn.Module, NoSync]:
    """The model under an engine, and the context in which that does not reduce gradients."""
    if name in OURS:
        import torch_shard

        return model, torch_shard.shard(model, **OURS[name]).no_sync
    if name == "DDP":
        ddp = nn.parallel.DistributedDataParallel(model)
        return ddp, ddp.no_sync
    from torch.distributed.fsdp import fully_shard

    shape, names = ((NODE, RANKS // NODE), ("replicate", "shard")) if "mesh" in name else ((RANKS,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    after: bool | int = NODE if "after" in name else True
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=after)
    fsdp: Any = fully_shard(model, mesh=mesh)

    @contextlib.contextmanager
    def no_sync() -> Any:
        fsdp.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            fsdp.set_requires_gradient_sync(True)

    return fsdp, no_sync


def step(model: nn.Module, no_sync: NoSync, optimizer: torch.optim.Optimizer, batches: list[list[Tensor]]) -> None:
    """Gradients of all micro-batches, reduced with the last one; and an update."""
    with no_sync():
        for data in batches[:-1]:
            model(*data).backward()
    model(*batches[-1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(rank: int, args: argparse.Namespace, folder: str) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    config = TINY if args.tiny else CONFIG
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(config.vocab, (MICRO, 1, config.context + 1), generator=generator)
    batches = [[t[:, :-1], t[:, 1:]] for t in tokens]
    result: dict[str, list[list[float]]] = {}
    node = set(range(rank // NODE * NODE, rank // NODE * NODE + NODE))
    for name in ENGINES:
        torch.manual_seed(0)
        model, no_sync = wrap(name, GPT(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        result[name] = []
        for chosen in (batches[:1], batches):
            step(model, no_sync, optimizer, chosen)  # memory of the order, buckets
            step(model, no_sync, optimizer, chosen)
            with CollectiveCounter() as counter:
                step(model, no_sync, optimizer, chosen)
            across = sum(call.sent for call in counter.calls if not set(call.ranks) <= node)
            result[name].append([counter.sent, across])
        del model, no_sync, optimizer
    if rank == 0:
        numel = sum(p.numel() for p in GPT(config).parameters())
        (Path(folder) / "result.json").write_text(json.dumps([numel, result]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a model that takes seconds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (args, folder), nprocs=RANKS)
        numel, result = json.loads((Path(folder) / "result.json").read_text())
    print(
        f"{numel / 1e6:.1f}M parameters, fp32, {RANKS} Gloo ranks as {RANKS // NODE} nodes; torch {torch.__version__}\n"
    )
    head = (
        "engine",
        "sent MiB",
        "of DDP's",
        "between nodes MiB",
        f"sent MiB, {MICRO} micro-batches",
        "of DDP's",
        "between",
    )
    print("| " + " | ".join(head) + " |\n|" + " --- |" * len(head))
    for name, ((sent, across), (sent_micro, across_micro)) in result.items():
        ddp = [steps[0] for steps in result["DDP"]]
        row = [f"{sent / MIB:.2f}", f"{sent / ddp[0]:.3f}", f"{across / MIB:.2f}"]
        row += [f"{sent_micro / MIB:.2f}", f"{sent_micro / ddp[1]:.3f}", f"{across_micro / MIB:.2f}"]
        print(f"| {'torch_shard, ' if name in OURS else ''}{name} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
