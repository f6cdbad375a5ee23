"""A small GPT, a loop that trains it, and what the allocator says about that."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

VOCABULARY = 53


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A decoder whose head shares its weight with the embedding; `between` runs after each block."""

    def __init__(
        self, width: int = 12, blocks: int = 3, heads: int = 3, length: int = 16, between: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.between = between or nn.Identity()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = self.between(block(h))
        return self.head(self.norm(h))


def tokens(rank: int, step: int, device: torch.device, size: int = 3, length: int = 8) -> torch.Tensor:
    """This rank's random input of a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(VOCABULARY, (size, length), generator=generator).to(device)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, engine: Any = None) -> None:
    """Predict the next token, clip if there is an `engine`, step."""
    logits = model(x)[:, :-1]
    F.cross_entropy(logits.reshape(-1, VOCABULARY), x[:, 1:].reshape(-1)).backward()
    if engine is not None:
        engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def peak_bytes(device: torch.device) -> int:
    """The most that was allocated at a time since ``torch.cuda.reset_peak_memory_stats``.

    Over Gloo in bytes asked for. There the allocator learns from events when a block is free again, so which block
    serves a request is a matter of timing, and a block may be larger than what is asked of it.
    """
    if "nccl" in dist.get_backend():
        return torch.cuda.max_memory_allocated(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"])


def nbytes(module: nn.Module) -> int:
    """Bytes of a plain module's parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())
