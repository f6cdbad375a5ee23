"""Small transformers models, built from their configs: nothing is downloaded.

``build(name, seed)`` gives a model, inputs for one forward and a function that turns its output
into a scalar loss. Dropout is off, so that equal weights give equal gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
LossFn = Callable[[Any], torch.Tensor]
Built = tuple[nn.Module, Inputs, LossFn]

VOCAB = 96
LENGTH = 12
BATCH = 2

_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def _loss(output: Any) -> torch.Tensor:
    loss = output.loss
    assert isinstance(loss, torch.Tensor)
    return loss


def _tokens(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCAB, (BATCH, length))


def _causal() -> Inputs:
    ids = _tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def _pixels(size: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def _gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=3, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config), _causal(), _loss


def _llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_TEXT, num_key_value_heads=2)), _causal(), _loss


def _qwen() -> Built:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_TEXT, num_key_value_heads=2)), _causal(), _loss


def _gemma() -> Built:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(**_TEXT, num_key_value_heads=1, head_dim=8)
    return GemmaForCausalLM(config), _causal(), _loss


def _mixtral() -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **_TEXT, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    return MixtralForCausalLM(config), _causal(), _loss


def _mamba() -> Built:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, state_size=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return MambaForCausalLM(config), _causal(), _loss


def _t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2,
        num_heads=4, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(), "labels": _tokens(7)}
    return T5ForConditionalGeneration(config), inputs, _loss


def _bart() -> Built:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=32, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
        forced_eos_token_id=None,
    )  # fmt: skip
    inputs = {"input_ids": _tokens(), "labels": _tokens(7)}
    return BartForConditionalGeneration(config), inputs, _loss


def _bert() -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(**_TEXT, **_NO_DROPOUT)
    return BertForMaskedLM(config), _causal(), _loss


def _modernbert() -> Built:
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    config = ModernBertConfig(
        **{**_TEXT, "num_attention_heads": 4}, global_attn_every_n_layers=2, local_attention=8,
        embedding_dropout=0.0, attention_dropout=0.0, mlp_dropout=0.0, cls_token_id=1,
        sep_token_id=2, reference_compile=False, attn_implementation="eager",
    )  # fmt: skip
    return ModernBertForMaskedLM(config), _causal(), _loss


def _whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48,
        decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4,
        num_mel_bins=8, max_source_positions=16, max_target_positions=16, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(BATCH, 8, 32), "labels": _tokens(7)}
    return WhisperForConditionalGeneration(config), inputs, _loss


def _vit() -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        image_size=16, patch_size=4, num_labels=5, **_NO_DROPOUT,
    )  # fmt: skip
    inputs = {"pixel_values": _pixels(16), "labels": torch.tensor([1, 3])}
    return ViTForImageClassification(config), inputs, _loss


def _swin() -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        mlp_ratio=2.0, drop_path_rate=0.0, num_labels=5, **_NO_DROPOUT,
    )  # fmt: skip
    inputs = {"pixel_values": _pixels(32), "labels": torch.tensor([1, 3])}
    return SwinForImageClassification(config), inputs, _loss


def _clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(
        text_config={**_TEXT, "num_hidden_layers": 2, "projection_dim": 16},
        vision_config={
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": 16, "patch_size": 4, "projection_dim": 16,
        },
        projection_dim=16,
    )  # fmt: skip
    ids = _tokens()
    ids[:, -1] = 2  # the text is pooled at its end token
    inputs = {"input_ids": ids, "pixel_values": _pixels(16), "return_loss": torch.tensor(True)}
    return CLIPModel(config), inputs, _loss


_BUILDERS: dict[str, Callable[[], Built]] = {
    "gpt2": _gpt2,
    "llama": _llama,
    "qwen": _qwen,
    "gemma": _gemma,
    "mixtral": _mixtral,
    "mamba": _mamba,
    "t5": _t5,
    "bart": _bart,
    "bert": _bert,
    "modernbert": _modernbert,
    "whisper": _whisper,
    "vit": _vit,
    "swin": _swin,
    "clip": _clip,
}

NAMES = tuple(_BUILDERS)
"""Names that :func:`build` knows."""


def build(name: str, seed: int = 0) -> Built:
    """Build a small model in training mode, with inputs and a loss.

    Args:
        name: One of :data:`NAMES`.
        seed: Seeds weights and inputs: equal seeds give equal bits. The global random state is left
            at a fixed point after it.

    Returns:
        ``(model, inputs, loss_fn)``; ``loss_fn(model(**inputs))`` is a scalar. float32 on the CPU
        (or the default device), batch of 2. With the meta device as default the model and inputs
        are meta tensors.
    """
    torch.manual_seed(seed)
    model, inputs, loss_fn = _BUILDERS[name]()
    return model.train(), inputs, loss_fn
