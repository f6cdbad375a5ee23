"""Small models that tests and bench/compare.py train, and their loss. Nothing here needs pytest or the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class MLP(nn.Module):
    """Blocks with residual connections, sizes that no number of ranks divides."""

    def __init__(self, width: int = 7, blocks: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(MLP):
    """Recomputes its blocks in backward, so many at a time."""

    def __init__(self, reentrant: bool = False, span: int = 1, blocks: int = 3) -> None:
        super().__init__(blocks=blocks)
        self.reentrant, self.span = reentrant, span

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for first in range(0, len(self.blocks), self.span):
            run = self.blocks[first] if self.span == 1 else nn.Sequential(*self.blocks[first : first + self.span])
            x = checkpoint(run, x, use_reentrant=self.reentrant)
        return self.head(x)


class Structured(nn.Module):
    """Keyword arguments, a dict that holds a list and a tuple as output."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 7), nn.Linear(5, 7, bias=False), nn.Linear(7, 3)

    def forward(self, *, x, scale=1.0, extra=None):
        h, g = self.a(x), self.b(x) * scale
        return {"sum": self.c(h + g), "parts": [h, (g, {"extra": extra, "n": 3})]}


class Uneven(nn.Module):
    """Shapes that no number of ranks divides, some smaller than the number of ranks."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.randn(1))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.cube = nn.Parameter(torch.randn(3, 5, 1))
        self.lin = nn.Linear(5, 13)

    def forward(self, x):
        return self.lin(x * self.row) * self.one + (x @ self.cube.sum(-1).t()).sum(-1, keepdim=True)


class WithEncode(nn.Module):
    """Forwards of submodules and other methods, past the model's own forward."""

    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))
        self.dec = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(4) * 1.5)

    def encode(self, x):
        return self.enc(x) * self.scale

    def forward(self, x):
        return self.dec(self.encode(x))


class LoRA(nn.Module):
    def __init__(self, width, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class FrozenFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.free = nn.Linear(5, 5), nn.Linear(5, 5)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.free(torch.tanh(self.frozen(x)))


class MAML(nn.Module):
    """Adapts fast weights by an inner step inside its own forward."""

    def __init__(self):
        super().__init__()
        self.features, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        h = torch.tanh(self.features(x))
        loss = self.head(h).pow(2).mean()
        fast = torch.autograd.grad(loss, [self.head.weight, self.head.bias], create_graph=True)
        w, b = self.head.weight - 0.1 * fast[0], self.head.bias - 0.1 * fast[1]
        return nn.functional.linear(torch.tanh(self.features(x + 1)), w, b)


class InnerBackward(nn.Module):
    """Runs a whole backward of its own inside forward, and keeps the input's gradient only."""

    def __init__(self):
        super().__init__()
        self.probe, self.lin = nn.Linear(5, 4), nn.Linear(5, 3)

    def forward(self, x):
        with torch.enable_grad():
            y = x.detach().clone().requires_grad_()
            self.probe(y).pow(2).sum().backward()
        return self.lin(x + 0.1 * y.grad)


class Codebook(nn.Module):
    """A vector quantizer whose codes follow the data: an update of a frozen parameter inside forward."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 4)
        self.codes = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.out = nn.Linear(4, 3)

    def forward(self, x):
        h = self.lin(x)
        index = torch.cdist(h.detach(), self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            with torch.no_grad():
                self.codes.data.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.out(h + (q - h).detach())


class MixedTypes(nn.Module):
    """Parameters of two dtypes in one unit."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 7, dtype=torch.float64)
        self.b = nn.Linear(7, 3, dtype=torch.float32)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5, 2.0], dtype=torch.float64))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).float()).double() * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind, layers=2):
        super().__init__()
        self.rnn = kind(5, 6, num_layers=layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        out, state = self.rnn(x.reshape(-1, 2, 5))
        return self.head(out), state


class Contained(nn.Module):
    """Parameters in lists and dicts, containers that have no forward, modules that have no parameters."""

    def __init__(self):
        super().__init__()
        self.identity, self.drop, self.act = nn.Identity(), nn.Dropout(0.0), nn.GELU()
        self.parts = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.ModuleList([nn.Linear(5, 5), nn.Identity()])})
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 5))])
        self.named = nn.ParameterDict({"x": nn.Parameter(torch.randn(5)), "y": nn.Parameter(torch.tensor(2.0))})
        self.empty = nn.ModuleList()
        self.holder = nn.Module()
        self.holder.scale = nn.Parameter(torch.randn(5))
        self.register_parameter("none", None)

    def forward(self, x):
        x = self.identity(x) * self.holder.scale
        x = self.drop(self.act(self.parts["a"](x)))
        for layer in self.parts["b"]:
            x = layer(x)
        return x * self.rows[0] + self.rows[1] * self.named["x"] + self.named["y"]


class Residual(nn.Module):
    def __init__(self, inside, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.down(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(Residual(4, 4), Residual(4, 6, 2))
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


class Remembered(nn.Module):
    """A tied weight, buffers, an RNN, a frozen parameter, and what users attach: a hook and attributes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(11, 6), nn.GRU(6, 6, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor([1.5]), requires_grad=False)
        self.head.weight.decays = False
        self.settings = {"width": 6}
        self.norm.register_forward_hook(double)

    def forward(self, x):
        return self.head(self.norm(self.rnn(self.embedding(x))[0].mean(1))) * self.scale


def loss_of(output: Any) -> torch.Tensor:
    """A scalar of every tensor in an output, each of them with a weight of its own."""
    total: Any = 0.0
    for i, tensor in enumerate(_tensors(output)):
        total = total + (i + 1) * (tensor.pow(2).mean() + tensor.sin().mean())
    return total


def _tensors(output: Any) -> Iterable[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif hasattr(output, "__dict__"):
        yield from _tensors(vars(output))
