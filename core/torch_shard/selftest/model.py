"""The model that the self-test trains, and its data: a small decoder, and random tokens that every rank can make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """The sizes of a :class:`Decoder`, and the sequences of one rank's batch."""

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    batch: int

    @property
    def tokens(self) -> int:
        """The tokens of one rank's batch."""
        return self.batch * self.context


SMALL = Size(layers=3, width=32, heads=2, context=16, vocab=64, batch=2)


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input of shape [batch, time, width]."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        # The softmax ignores a bias of the keys, whose gradient would be nothing but rounding errors.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + down


class Decoder(nn.Module):
    """A decoder-only transformer; `between`, if given, is called after each block in forward and in backward."""

    def __init__(self, size: Size, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.between = between
        self.tokens = nn.Embedding(size.vocab, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 tokens [batch, time] to logits [batch, time, vocab]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x) if self.between is None else self.between(block(x))
        logits: Tensor = self.head(self.norm(x))
        return logits


def make(size: Size, device: torch.device, seed: int = 0, between: Callable[[Tensor], Tensor] | None = None) -> Decoder:
    """Return a model with the same values for the same seed on every rank. It is made on `device`, which is fast on a GPU."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), device:
        torch.manual_seed(seed)
        return Decoder(size, between)


def batch(size: Size, device: torch.device, *number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, both int64 [batch, context]; `number` has the step, the rank and the micro-batch, if given."""
    seed = 0
    for each in number:
        seed = 1009 * seed + each
    tokens = torch.randint(
        size.vocab, (size.batch, size.context + 1), generator=torch.Generator().manual_seed(seed)
    ).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def mean_loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch in fp32, whatever dtype the model computes in."""
    return F.cross_entropy(model(data[0]).float().flatten(0, 1), data[1].flatten())
