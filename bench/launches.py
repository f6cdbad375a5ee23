"""What a training step gives a device and its host to do, counted beside FSDP2. No device is needed.

    python bench/launches.py            8 ranks, which share this machine's cores
    python bench/launches.py --short    2 ranks
    python bench/launches.py --tiny     2 ranks, fewer blocks and one precision, to try the script

Each engine trains a stack of transformer blocks with 12 parameters each on several ranks. torch_shard takes the way of an
accelerator: it runs on the simulated device of its tests (tests/simulated), with streams and events, and sends by Gloo. FSDP2 has
one way for all devices, whose streams and events do nothing on a CPU; they are counted where it calls them.

A dispatch mode sees each ATen operator of a step. One that computes or copies counts as one kernel, also where a multi-tensor
operator works on many tensors. Those of the same step of the plain model, in the precision of the engine's computation, are
subtracted. Figures per block are differences between a deep and a shallow stack. Bytes are those that kernels read and write;
what the collectives themselves read, write and send is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (makes the backend known)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

DEEP, SHALLOW = 8, 4
TINY = 3, 2
WIDTH, TIME, BATCH = 64, 16, 2
BF16 = torch.bfloat16
FROZEN = "bf16, matrices frozen"
# By name: the dtype of computation and of the reduction; None for fp32.
PRECISIONS: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16, summed in fp32": (BF16, torch.float32),
    "bf16": (BF16, BF16),
    FROZEN: (BF16, BF16),
}
ENGINES = {"fsdp2": "FSDP2", "ours": "torch_shard"}

# Operators that touch no memory, beside those that make views.
_NO_KERNEL = {"detach", "detach_", "set_", "resize_", "lift_fresh", "_unsafe_view", "requires_grad_", "alias"}
# Operators that overwrite what they are given without reading it.
_OVERWRITE = {"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "all_gather_copy_in", "chunk_cat"}
_HOST_WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero"}


class Stack(nn.Module):
    """Transformer blocks between two linear layers."""

    def __init__(self, blocks: int, frozen: bool) -> None:
        """Make the blocks; with `frozen` their matrices aren't trained, as with LoRA; everything else is."""
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(blocks)
        )
        for param in self.blocks.parameters():
            param.requires_grad = not frozen or param.dim() == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


@dataclass
class Tally:
    """What one step has given to do."""

    kernels: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    events: int = 0
    waits: int = 0
    host_waits: int = 0

    def figures(self) -> dict[str, float]:
        """Return the totals."""
        return {
            "kernels": self.kernels.total(),
            "bytes": self.nbytes,
            "collectives": self.collectives.total(),
            "events": self.events,
            "waits": self.waits,
            "messages": self.messages.total(),
            "host waits": self.host_waits,
        }


class Counting(TorchDispatchMode):
    """Context in which the operators of this process are counted in `tally`.

    `simulated`: the device's collectives are counted elsewhere, and what is seen here is a message between the hosts.
    """

    def __init__(self, tally: Tally, simulated: bool) -> None:
        super().__init__()
        self.tally, self.simulated = tally, simulated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if FakeTensor in types:
            return func(*args, **(kwargs or {}))  # DTensor asks for the shape of a result
        if any(t not in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented  # DTensors and ShardTensors first: what their handlers call comes back here
        with torch._C.DisableTorchFunction():  # the simulation has seen the call already
            result = func(*args, **(kwargs or {}))
        name, tally = func._opname, self.tally
        if func.namespace == "c10d":
            (tally.messages if self.simulated else tally.collectives)[name] += 1
        elif name in _HOST_WAITS:
            tally.host_waits += not self.simulated  # the simulation knows which memory is the device's
        elif not (func.is_view or name in _NO_KERNEL or name.startswith(("empty", "new_empty", "_record_function"))):
            tally.kernels[name] += 1
            tally.nbytes += _bytes_of(func, name, args, kwargs or {}, result)
        return result


def _bytes_of(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    total = 0
    for key, value in given.items():
        size = sum(t.nbytes for t in tree_leaves(value) if isinstance(t, torch.Tensor))
        overwritten = key in written and (name in _OVERWRITE or key == "out")
        total += size * ((key in written) + (not overwritten))
    if not written:
        total += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, torch.Tensor))
    return total


@contextlib.contextmanager
def counted(simulated: Any = None) -> Iterator[Tally]:
    """Return a context in which all that this process gives a device and its host to do is counted.

    `simulated` is the streams of the simulated device; None for those of torch.cpu, which FSDP2 uses.
    """
    tally = Tally()

    def counts(attribute: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(tally, attribute, getattr(tally, attribute) + 1)
            return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        if simulated is None:
            _complete_cpu_streams()
            replaced = [(torch.cpu.Stream, name, "waits") for name in ("wait_stream", "wait_event")]
            replaced += [(torch.cpu.Stream, "record_event", "events"), (torch.cpu.Event, "record", "events")]
            replaced += [(torch.cpu.Event, "synchronize", "host_waits")]
            for owner, name, attribute in replaced:
                stack.enter_context(mock.patch.object(owner, name, counts(attribute, getattr(owner, name))))
        else:
            from tests.simulated.process_group import SimulatedGroup
            from torch_shard.comm.comparisons import Comparisons

            run = SimulatedGroup._run

            def collective(group: Any, name: str, *args: Any) -> Any:
                tally.collectives[name] += 1
                return run(group, name, *args)

            begin = Comparisons.begin

            def begun(*args: Any) -> Any:
                tally.messages["begun"] -= 1  # the host goes on
                return begin(*args)

            stack.enter_context(mock.patch.object(Comparisons, "begin", begun))
            stack.enter_context(mock.patch.object(SimulatedGroup, "_run", collective))
        stack.enter_context(Counting(tally, simulated is not None))
        if simulated is None:
            yield tally
            return
        totals = lambda: (simulated.events, simulated.stream_waits, sum(simulated.waits.values()))  # noqa: E731
        before = totals()
        yield tally
        tally.events, tally.waits, tally.host_waits = (now - b for now, b in zip(totals(), before, strict=True))


def _complete_cpu_streams() -> None:
    """Give torch.cpu's streams and events, which are empty, the methods that FSDP2 calls on those of a device."""
    for owner, names in ((torch.cpu.Stream, ("wait_stream", "wait_event")), (torch.cpu.Event, ("synchronize",))):
        for name in names:
            if not hasattr(owner, name):
                setattr(owner, name, lambda self, *args: None)


# -- one engine ---------------------------------------------------------------------------------------------------


def count(engine: str, precision: str, blocks: int) -> dict[str, Any]:
    """Return what a steady step of an engine gives to do; for "plain", of the model itself."""
    compute, summed = PRECISIONS[precision]
    frozen = precision == FROZEN
    torch.manual_seed(0)
    if engine != "ours":
        model = Stack(blocks, frozen)
        if engine == "plain":
            model = model.to(compute or torch.float32)
            return _steps(model, None, torch.device("cpu"), compute, None)
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(compute, summed)
        # Gloo copies the result of a reduce-scatter once more, as no device does. This backend sends nothing.
        mesh = DeviceMesh.from_group(dist.new_group(backend="fake"), "cpu", mesh_dim_names=("shard",))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        trained = [param for param in model.parameters() if param.requires_grad]
        clip = functools.partial(nn.utils.clip_grad_norm_, trained, 1.0)
        return _steps(model, clip, torch.device("cpu"), None, None)
    import torch_shard
    from tests.simulated.modes import ACCELERATOR
    from tests.simulated.simulation import group, simulated

    over = group()
    with simulated("early") as world:
        with ACCELERATOR:
            model = Stack(blocks, frozen)
        chosen = None if compute is None else torch_shard.Precision(compute, summed)
        sharded = torch_shard.shard(model, precision=chosen, mesh=over)
        found = _steps(model, functools.partial(sharded.clip_grad_norm_, 1.0), ACCELERATOR, None, world.streams)
        del model, sharded
        gc.collect()
    return found


def _steps(
    model: nn.Module, clip: Callable[[], Any] | None, device: torch.device, dtype: torch.dtype | None, simulated: Any
) -> dict[str, Any]:
    """Train until steps repeat; return the tally of the next one, forward and backward apart from clipping and the step."""
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, foreach=True)
    x = torch.randn(BATCH, TIME, WIDTH, device=device)
    x = x if dtype is None else x.to(dtype)
    found: dict[str, Any] = {}
    for _ in range(4):
        optimizer.zero_grad()
        with counted(simulated) as tally:
            model(x).float().square().mean().backward()
        with counted(simulated) as clipping:
            if clip is not None:
                clip()
        with counted(simulated) as stepping:
            optimizer.step()
        found = tally.figures() | {"names": tally.kernels, "kinds": tally.collectives}
        found["messages after"] = clipping.messages.total() + stepping.messages.total()
        # Plain AdamW reads its step counters, which are on the host, and the simulation alone tells host and device apart.
        found["host waits after"] = clipping.host_waits + (0 if simulated is None else stepping.host_waits)
    return found


def count_all(args: argparse.Namespace) -> dict[str, Any]:
    """Return what each engine gives to do, on one rank of the default group. Collective."""
    return {
        f"{engine} {precision} {blocks}": count(engine, precision, blocks)
        for engine in ("plain", *ENGINES)
        for precision in args.precisions
        for blocks in args.blocks
    }


def run(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Count on one rank; rank 0 writes the result."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks)
    result = count_all(args)
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# -- the table ----------------------------------------------------------------------------------------------------


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """Print the tables."""
    elements = sum(p.numel() for p in nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH).parameters())
    most, fewer = args.blocks
    n = most - fewer
    print(f"torch {torch.__version__}, {args.ranks} ranks, {most} blocks of 12 parameters\n")
    print(
        "| precision | engine | per block: kernels | bytes a parameter element | collectives | events | waits of streams ",
        end="",
    )
    print(
        "| per step: messages for which the host waits | of these by clipping and the step | waits of the host for the device |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for precision in args.precisions:
        for engine, label in ENGINES.items():
            deep, shallow = (result[f"{engine} {precision} {blocks}"] for blocks in args.blocks)
            plain, less = (result[f"plain {precision} {blocks}"] for blocks in args.blocks)
            own = {key: (deep[key] - shallow[key] - plain[key] + less[key]) / n for key in ("kernels", "bytes")}
            rates = [(deep[key] - shallow[key]) / n for key in ("collectives", "events", "waits")]
            print(
                f"| {precision} | {label} | {own['kernels']:g} | {own['bytes'] / elements:.1f} | "
                f"{' | '.join(f'{rate:g}' for rate in rates)} | {deep['messages'] + deep['messages after']:g} | "
                f"{deep['messages after']:g} | {deep['host waits'] + deep['host waits after']:g} |"
            )
            if args.details:
                names = {
                    name: (deep["names"].get(name, 0) - shallow["names"].get(name, 0)) / n
                    - (plain["names"].get(name, 0) - less["names"].get(name, 0)) / n
                    for name in deep["names"]
                }
                print(f"    { ({k: v for k, v in names.items() if v}) } {deep['kinds']}")


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line, by default this program's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--short", action="store_true", help="2 ranks")
    parser.add_argument("--tiny", action="store_true", help="2 ranks, fewer blocks, one precision: to try the script")
    parser.add_argument("--details", action="store_true", help="name the kernels, too")
    args = parser.parse_args(arguments)
    if args.short or args.tiny:
        args.ranks = 2
    args.blocks, args.precisions = (TINY, [FROZEN]) if args.tiny else ((DEEP, SHALLOW), list(PRECISIONS))
    return args


def main() -> None:
    args = options()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args, folder), nprocs=args.ranks)
        report(json.loads((Path(folder) / "result.json").read_text()), args)


if __name__ == "__main__":
    main()
