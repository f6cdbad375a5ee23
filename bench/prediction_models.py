"""The models of ``prediction.py``, each with a loss: small relatives of what people train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["LARGE_MODELS", "MODELS", "Training"]


@dataclass
class Training:
    """A model, and what computes the loss of a batch with it."""

    model: nn.Module
    loss: Callable[[nn.Module], torch.Tensor]


_WORDS, _BATCH, _LENGTH = 4096, 4, 128


def _tokens(length: int = _LENGTH) -> torch.Tensor:
    return torch.randint(0, _WORDS, (_BATCH, length))


def _transformers(kind: str, checkpointing: bool, **settings: Any) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **settings)
    auto = {
        "bert": transformers.AutoModelForMaskedLM,
        "distilbert": transformers.AutoModelForMaskedLM,
        "vit": transformers.AutoModelForImageClassification,
        "t5": transformers.AutoModelForSeq2SeqLM,
        "bart": transformers.AutoModelForSeq2SeqLM,
    }.get(kind, transformers.AutoModelForCausalLM)
    more = (
        {"experts_implementation": "batched_mm"} if kind == "mixtral" else {}
    )  # of shapes that don't depend on values
    model = auto.from_config(config, attn_implementation="eager" if kind in ("t5", "bloom") else "sdpa", **more)
    if checkpointing:
        model.gradient_checkpointing_enable()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train()


def _language_model(kind: str, length: int = _LENGTH, **settings: Any) -> Callable[[bool], Training]:
    def make(checkpointing: bool) -> Training:
        tokens = _tokens(length)
        model = _transformers(kind, checkpointing, vocab_size=_WORDS, **settings)
        return Training(model, lambda model: model(input_ids=tokens, labels=tokens).loss)

    return make


_WIDE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
_SMALL = {**_WIDE, "num_key_value_heads": 2}


def _vit(checkpointing: bool) -> Training:
    images, labels = torch.randn(_BATCH, 3, 112, 112), torch.randint(0, 2, (_BATCH,))
    model = _transformers("vit", checkpointing, image_size=112, **_WIDE)
    return Training(model, lambda model: model(pixel_values=images, labels=labels).loss)


def _encoder_decoder(kind: str, **settings: Any) -> Callable[[bool], Training]:
    def make(checkpointing: bool) -> Training:
        tokens, labels = _tokens(), _tokens(64)
        model = _transformers(kind, checkpointing, vocab_size=_WORDS, **settings)
        return Training(model, lambda model: model(input_ids=tokens, labels=labels).loss)

    return make


def _lora(checkpointing: bool) -> Training:
    import peft

    training = _language_model("llama", **_SMALL)(False)
    config = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if checkpointing:
        training.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        training.model.enable_input_require_grads()
    return Training(peft.get_peft_model(training.model, config), training.loss)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_WORDS, 256)
        self.lstm = nn.LSTM(256, 384, 2, batch_first=True)
        self.head = nn.Linear(384, _WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.lstm(self.tokens(tokens))[0])
        return logits


def _lstm(checkpointing: bool) -> Training:
    tokens = _tokens(64)
    return Training(_Lstm(), lambda model: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()))


class _Residual(nn.Module):
    """A block of a diffusion model's U-Net."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)])
        self.convs = nn.ModuleList(
            [nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)]
        )
        self.time = nn.Linear(128, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.convs[0](F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        skip: torch.Tensor = self.skip(x)
        return skip + self.convs[1](F.silu(self.norms[1](y)))


class _UNet(nn.Module):
    def __init__(self, checkpointing: bool):
        super().__init__()
        widths = (64, 128, 192)
        self.checkpointing = checkpointing
        self.time = nn.Sequential(nn.Linear(1, 128), nn.SiLU(), nn.Linear(128, 128))
        self.first = nn.Conv2d(3, widths[0], 3, padding=1)
        self.down = nn.ModuleList([_Residual(a, b) for a, b in zip((64, *widths), widths, strict=False)])
        self.up = nn.ModuleList([_Residual(a + a, b) for a, b in zip(widths[::-1], (*widths[1::-1], 64), strict=True)])
        self.last = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        def block(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
            if self.checkpointing:
                return checkpoint(module, *args, use_reentrant=False)  # type: ignore[no-any-return]
            return module(*args)  # type: ignore[no-any-return]

        time = self.time(time)
        x = self.first(x)
        kept = []
        for module in self.down:
            x = block(module, x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        for module in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(module, torch.cat([x, kept.pop()], 1), time)
        last: torch.Tensor = self.last(x)
        return last


def _unet(checkpointing: bool) -> Training:
    images, time = torch.randn(_BATCH, 3, 32, 32), torch.rand(_BATCH, 1)
    return Training(_UNet(checkpointing), lambda model: F.mse_loss(model(images, time), images))


class _Mlp(nn.Module):
    def __init__(self, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 1536), nn.GELU(), nn.Linear(1536, 512)) for _ in range(4)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=True) if self.checkpointing else block(x))
        return x


def _mlp(checkpointing: bool) -> Training:
    x = torch.randn(256, 512, requires_grad=checkpointing)
    return Training(_Mlp(checkpointing), lambda model: model(x).square().mean())


_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256}
_T5 = {
    "d_model": 256,
    "d_ff": 704,
    "num_layers": 3,
    "num_heads": 4,
    "d_kv": 64,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
_BART = {
    "d_model": 256, "encoder_layers": 3, "decoder_layers": 3, "encoder_ffn_dim": 704, "decoder_ffn_dim": 704,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
_EXPERTS = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip

MODELS: dict[str, Callable[[bool], Training]] = {
    "mlp": _mlp,
    "lstm": _lstm,
    "unet": _unet,
    "vit": _vit,
    "lora": _lora,
    "t5": _encoder_decoder("t5", **_T5),
    "bart": _encoder_decoder("bart", **_BART),
    "bert": _language_model("bert", **_WIDE),
    "distilbert": _language_model("distilbert", dim=256, hidden_dim=704, n_layers=4, n_heads=4),
    "gpt2": _language_model("gpt2", **_GPT2),
    "gptj": _language_model("gptj", **_GPT2, rotary_dim=32),
    "gpt_neox": _language_model("gpt_neox", **_WIDE),
    "opt": _language_model(
        "opt", hidden_size=256, ffn_dim=704, num_hidden_layers=4, num_attention_heads=4, word_embed_proj_dim=256
    ),
    "bloom": _language_model("bloom", hidden_size=256, n_layer=4, n_head=4),
    "llama": _language_model("llama", **_SMALL),
    "mistral": _language_model("mistral", **_SMALL),
    "qwen2": _language_model("qwen2", **_SMALL),
    "phi": _language_model("phi", **_SMALL),
    "gemma": _language_model("gemma", **_SMALL, head_dim=64),
    "mixtral": _language_model("mixtral", length=16, **_EXPERTS),
}
"""The models by name. The argument of each asks for activation checkpointing of its blocks."""

_WIDER = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 12}

LARGE_MODELS: dict[str, Callable[[bool], Training]] = {
    "bert": _language_model("bert", **_WIDER),
    "gpt2": _language_model("gpt2", n_embd=768, n_layer=8, n_head=12, n_positions=256),
    "llama": _language_model("llama", **_WIDER, num_key_value_heads=4),
    "mixtral": _language_model("mixtral", length=64, **{**_EXPERTS, "hidden_size": 512, "intermediate_size": 2048}),
    "t5": _encoder_decoder("t5", **{**_T5, "d_model": 768, "d_ff": 2048, "num_layers": 5, "num_heads": 12}),
}
"""Relatives of some of these that take 500 MB and more."""
