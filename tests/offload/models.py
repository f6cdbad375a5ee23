"""What the tests of offload train."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from torch import nn

import torch_shard
from tests.support.inside import runtime_of
from torch_shard import Offload, Precision

HALF = Precision(param_dtype=torch.bfloat16)
OFFLOADS = ["cpu", "kept", "disk", "all on disk"]
"""For :func:`chosen`."""

WIDTH = 96
"""Of the model: slices on 1, 2 and 3 ranks, of layers and blocks, have multiples of 16 elements."""

OPTIMIZERS = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),  # which has scalars beside the count of steps
}


class Model(nn.Module):
    """Fused kernels compute the last elements of a tensor, less than one register's, another way. Which these are depends on what
    is stepped together; with such sizes there are none, so that results can be compared bit by bit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def inputs(rank, step):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(model, x):
    return (model(x) - x.roll(1, 0)).pow(2).mean()


class Training:
    """A sharded model with its optimizer. `offload`: as in ShardConfig; `optimizer`: a name of OPTIMIZERS, or a function of the
    model; `make`: of the model."""

    def __init__(self, rank, offload, optimizer="AdamW", make=Model, **settings):
        self.rank = rank
        self.model = make()
        self.engine = torch_shard.shard(self.model, torch_shard.ShardConfig(offload=offload, **settings))
        self.optimizer = OPTIMIZERS.get(optimizer, optimizer)(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.95)
        self.seen = []

    def step(self, number, accumulate=1, clip=None, sync=True):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            with self.engine.no_sync() if not sync and not last else torch.enable_grad():
                x = inputs(self.rank, 10 * number + micro).to(next(self.model.parameters()).dtype)
                loss = loss_of(self.model, x) / accumulate
                loss.backward()
            self.seen.append(loss.item())
        if clip is not None:
            self.seen.append(self.engine.clip_grad_norm_(clip).item())
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def read(self, number):
        """Look at one thing after the other, a step each: what is read waits for what is done to it."""
        last = list(self.model.parameters())[-1]
        if number % 4 == 1:
            self.seen.append(last.detach().full_tensor())
        if number % 4 == 2:
            kept = self.optimizer.state.get(last, {})
            self.seen += [v.full_tensor() for v in kept.values() if isinstance(v, torch_shard.ShardTensor)]
        if number % 4 == 3:
            self.seen.append(self.engine.state_dict(form="full"))

    def state(self):
        """Everything, whole: parameters and optimizer state."""
        whole = self.engine.state_dict(form="full")
        optimizer = self.engine.optim_state_dict(self.optimizer)
        return whole, optimizer


def hold(training, seconds=20.0):
    """The host thread does nothing for so long, or until the event that this returns is set."""
    go = threading.Event()
    runtime_of(training.engine).host.thread.do(functools.partial(go.wait, seconds))
    return go


@contextlib.contextmanager
def held_up(training):
    """The host thread does nothing until the end of the block."""
    go = hold(training)
    try:
        yield
    finally:
        go.set()


def units(training):
    return runtime_of(training.engine).units


def flats(training):
    return [flat for unit in units(training) for flat in unit.flats]


def flattened(value, name=""):
    if isinstance(value, dict):
        return {k: v for key, own in value.items() for k, v in flattened(own, f"{name}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for n, own in enumerate(value) for k, v in flattened(own, f"{name}.{n}").items()}
    return {name: value}


def same(one, other):
    """Bit by bit."""
    one, other = flattened(one), flattened(other)
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key], key


def chosen(name, directory):
    """A setting of OFFLOADS, whose files go below `directory`; None for no offload."""
    if name in ("disk", "all on disk"):
        return Offload(nvme=directory, nvme_params=name != "disk")
    return Offload(params=False) if name == "kept" else name


def steps(training, count=4, **how):
    """Train, with a look at something behind each step. All that can be compared."""
    for number in range(count):
        training.step(number, **how)
        training.read(number)
    return training.seen, *training.state()


def alike(train, offload):
    """What `train` returns, a function of a setting of offload, is the same without it."""
    same(train(None), train(offload))
