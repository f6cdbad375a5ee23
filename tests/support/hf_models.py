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


def _text_to_text() -> Inputs:
    return {"input_ids": _tokens(), "labels": _tokens(7)}


def _images(size: int) -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, size, size), "labels": torch.tensor([1, 3])}


def _texts_and_images() -> Inputs:
    ids = _tokens()
    ids[:, -1] = 2  # the text is pooled at its end token
    return {"input_ids": ids, "pixel_values": _images(16)["pixel_values"], "return_loss": torch.tensor(True)}


_ENCODER_DECODER = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "image_size": 16, "patch_size": 4,
}  # fmt: skip

_MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Inputs]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 4, "resid_pdrop": 0.0,
        "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    }, _causal),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, "num_key_value_heads": 2}, _causal),
    "qwen": ("Qwen2Config", "Qwen2ForCausalLM", {**_TEXT, "num_key_value_heads": 2}, _causal),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}, _causal),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {
        **_TEXT, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }, _causal),
    "mamba": ("MambaConfig", "MambaForCausalLM", {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
    }, _causal),
    "t5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
        "num_heads": 4, "dropout_rate": 0.0, "decoder_start_token_id": 0,
    }, _text_to_text),
    "bart": ("BartConfig", "BartForConditionalGeneration", {
        **_ENCODER_DECODER, "max_position_embeddings": 32, "decoder_start_token_id": 2, "forced_eos_token_id": None,
    }, _text_to_text),
    "bert": ("BertConfig", "BertForMaskedLM", {**_TEXT, **_NO_DROPOUT}, _causal),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {
        **_TEXT, "global_attn_every_n_layers": 2, "local_attention": 8, "embedding_dropout": 0.0, "attention_dropout": 0.0,
        "mlp_dropout": 0.0, "cls_token_id": 1, "sep_token_id": 2, "reference_compile": False,
        "attn_implementation": "eager",
    }, _causal),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {
        **_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    }, lambda: {"input_features": torch.randn(BATCH, 8, 32), "labels": _tokens(7)}),
    "vit": ("ViTConfig", "ViTForImageClassification", {
        **_VISION, **_NO_DROPOUT, "num_hidden_layers": 3, "num_labels": 5,
    }, lambda: _images(16)),
    "swin": ("SwinConfig", "SwinForImageClassification", {
        **_NO_DROPOUT, "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
        "window_size": 4, "mlp_ratio": 2.0, "drop_path_rate": 0.0, "num_labels": 5,
    }, lambda: _images(32)),
    "clip": ("CLIPConfig", "CLIPModel", {
        "text_config": {**_TEXT, "num_hidden_layers": 2, "projection_dim": 16},
        "vision_config": {**_VISION, "num_hidden_layers": 2, "projection_dim": 16}, "projection_dim": 16,
    }, _texts_and_images),
}  # fmt: skip
"""By name: the class of the config, that of the model, the config's arguments, and what makes inputs."""

NAMES = tuple(_MODELS)
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
    import transformers

    config, model, arguments, inputs = _MODELS[name]
    torch.manual_seed(seed)
    built = getattr(transformers, model)(getattr(transformers, config)(**arguments))
    return built.train(), inputs(), _loss
