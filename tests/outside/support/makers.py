"""Data and pretrained models that are made on the spot, tiny ones."""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "bert",
    "images",
    "json_file",
    "language_model",
    "rows",
    "stable_diffusion",
    "t5",
    "unconditional_unet",
    "words",
]


def json_file(path: Path, content: Any) -> None:
    """Write `content` as JSON, with the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2))


def images(folder: Path, count: int, size: int = 32, columns: Sequence[str] = (), captions: str = "") -> None:
    """Write PNG files of random pixels, as an ``imagefolder`` of datasets.

    Args:
        count: how many rows.
        size: of the images, in pixels.
        columns: names of columns of images; one column ``image`` by default.
        captions: the name of a column of texts; none by default.
    """
    from PIL import Image

    folder.mkdir(parents=True)
    draw = torch.Generator().manual_seed(7)
    lines = []
    for number in range(count):
        row = {captions: f"a {string.ascii_lowercase[number % 26]} b{number % 5}"} if captions else {}
        for column in columns or ("",):
            pixels = torch.randint(0, 256, (size, size, 3), generator=draw, dtype=torch.uint8)
            name = f"{column}{number:03}.png"
            Image.fromarray(pixels.numpy()).save(folder / name)
            row[f"{column}_file_name" if column else "file_name"] = name
        lines.append(json.dumps(row))
    if captions or columns:
        (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def unconditional_unet(path: Path) -> None:
    """Write the configuration of a UNet2DModel of 60,000 parameters."""
    json_file(
        path,
        {
            "_class_name": "UNet2DModel",
            "sample_size": 16,
            "in_channels": 3,
            "out_channels": 3,
            "layers_per_block": 1,
            "block_out_channels": [8, 16],
            "norm_num_groups": 4,
            "attention_head_dim": 8,
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
        },
    )


def stable_diffusion(folder: Path) -> None:
    """Save a Stable Diffusion pipeline whose parts are tiny, and a ControlNet for it in ``controlnet``."""
    import diffusers
    import transformers

    torch.manual_seed(3)
    characters = string.ascii_lowercase + string.digits + "<>-*"
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    tokenizer = transformers.CLIPTokenizer({w: n for n, w in enumerate(words)}, [], model_max_length=16)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=2,
        cross_attention_dim=16,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    config = transformers.CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=16,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    diffusers.StableDiffusionPipeline(
        vae=vae,
        text_encoder=transformers.CLIPTextModel(config),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=diffusers.DDPMScheduler(clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    net = diffusers.ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 16))
    for parameter in net.parameters():  # its last layers begin with zeros
        torch.nn.init.normal_(parameter, std=0.1)
    net.save_pretrained(folder / "controlnet")


def words(number: int, length: int = 8) -> str:
    """Return a text of `length` words out of fifty, another one for each number."""
    draw = torch.Generator().manual_seed(number)
    return " ".join(f"w{n}" for n in torch.randint(0, 50, (length,), generator=draw).tolist())


def rows(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Write a table as JSON lines, with the folders around it; datasets takes ``train.jsonl`` for the split ``train``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _tokenizer(folder: Path, **special: str) -> int:
    """Save a tokenizer of the words of `words`; return the size of its vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = [*dict.fromkeys(special.values()), *(f"w{n}" for n in range(50))]
    found = Tokenizer(models.WordLevel({w: n for n, w in enumerate(vocabulary)}, unk_token=special["unk_token"]))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if "cls_token" in special:
        begin, end = ((special[name], vocabulary.index(special[name])) for name in ("cls_token", "sep_token"))
        found.post_processor = processors.BertProcessing(end, begin)
    elif "eos_token" in special and "bos_token" not in special:  # as of T5, whose labels must end for it to learn to
        end = special["eos_token"]
        found.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, vocabulary.index(end))]
        )
    PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=64, **special).save_pretrained(folder)
    return len(vocabulary)


def language_model(folder: Path, labels: int = 0) -> None:
    """Save a Llama of 15,000 parameters and its tokenizer, with a head of so many labels if there are any."""
    import transformers

    torch.manual_seed(4)
    size = _tokenizer(folder, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
        **({"num_labels": labels} if labels else {}),
    )
    kind = transformers.LlamaForSequenceClassification if labels else transformers.LlamaForCausalLM
    kind(config).save_pretrained(folder)


def bert(folder: Path, masked: bool = False) -> None:
    """Save a BERT of 20,000 parameters and its tokenizer, with a head for masked words if asked for."""
    import transformers

    torch.manual_seed(5)
    special = {
        name: f"[{name[:-6].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    }
    size = _tokenizer(folder, **special)
    config = transformers.BertConfig(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    kind = transformers.BertForMaskedLM if masked else transformers.BertModel
    kind(config).save_pretrained(folder)


def t5(folder: Path) -> None:
    """Save a T5 of 20,000 parameters and its tokenizer."""
    import transformers

    torch.manual_seed(6)
    size = _tokenizer(folder, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = transformers.T5Config(
        vocab_size=size,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
