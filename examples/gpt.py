"""A byte-level GPT, written as anyone would write one: nothing here knows about sharding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "PRESETS", "Block", "GPTConfig"]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a :class:`GPT`; the defaults train in about two minutes on two CPU cores."""

    layers: int = 4
    width: int = 192
    heads: int = 6
    context: int = 128
    vocab: int = 256


PRESETS = {
    "tiny": GPTConfig(),
    "50M": GPTConfig(layers=16, width=512, heads=8, context=256),
    "350M": GPTConfig(layers=28, width=1024, heads=16, context=1024),
}


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        # No bias: softmax ignores the key's, whose gradient would be rounding noise alone.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, time, width] to the same shape; position t sees positions up to t."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Decoder-only transformer over tokens 0 .. vocab-1 (the 256 bytes, unless told otherwise)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                # GPT-2's rule: what is added to the residual stream starts smaller, with depth.
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(param, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, time, vocab] or, with `targets`, the mean loss in nats per token.

        Both inputs are int64 [batch, time] with time at most ``config.context``.
        """
        time = tokens.shape[1]
        x = self.token(tokens) + self.position(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, new: int, temperature: float = 0.8, seed: int = 0) -> Tensor:
        """Append `new` sampled tokens to int64 [batch, time]; call on all ranks when sharded.

        The same seed draws the same tokens on every rank, so that all ranks make the same number
        of forwards with the same inputs.
        """
        generator = torch.Generator().manual_seed(seed)
        for _ in range(new):
            logits = self(tokens[:, -self.config.context :])[:, -1].float().cpu()
            choice = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, choice.to(tokens.device)], dim=1)
        return tokens
