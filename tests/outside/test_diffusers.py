"""Example programs of diffusers, for Accelerate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from .support import makers
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched, Outside

COMMIT = "58eb52c0803e"
UNCONDITIONAL = Outside("diffusers/train_unconditional.py", "0314b03f4fa7eed8")
TEXT_TO_IMAGE = Outside("diffusers/train_text_to_image.py", "4c5f10d3986bc41c")


def example(path: str, digest: str) -> Fetched:
    return Fetched("huggingface/diffusers", COMMIT, f"examples/{path}", digest)


def unconditional(folder: Path) -> None:
    makers.images(folder / "images", 16)
    makers.unconditional_unet(folder / "unet" / "config.json")


def captioned(folder: Path) -> None:
    makers.images(folder / "images", 16, captions="text")
    makers.stable_diffusion(folder / "pretrained")


def instances(folder: Path) -> None:
    makers.images(folder / "images", 8)
    makers.stable_diffusion(folder / "pretrained")


def conditioned(folder: Path) -> None:
    makers.images(folder / "images", 16, columns=("image", "conditioning_image"), captions="text")
    makers.stable_diffusion(folder / "pretrained")


def edited(folder: Path) -> None:
    makers.images(folder / "images", 16, columns=("input_image", "edited_image"), captions="edit_prompt")
    makers.stable_diffusion(folder / "pretrained")


_UNCONDITIONAL = (
    "--train_data_dir={data}/images", "--model_config_name_or_path={data}/unet", "--output_dir=out", "--resolution=16",
    "--train_batch_size=2", "--eval_batch_size=2", "--num_epochs=2", "--save_images_epochs=1", "--save_model_epochs=2",
    "--lr_warmup_steps=2", "--learning_rate=1e-3", "--ddpm_num_steps=10", "--ddpm_num_inference_steps=3",
)  # fmt: skip


def text_to_image(*more: str, data: str = "--train_data_dir={data}/images") -> Sequence[str]:
    return (
        "--pretrained_model_name_or_path={data}/pretrained", data, "--output_dir=out", "--resolution=16",
        "--train_batch_size=2", "--max_train_steps=6", "--learning_rate=1e-3", "--seed=0", *more,
    )  # fmt: skip


KEYS = Tolerance(noise={"*.to_k.bias": 1e-4, "*.k_proj.bias": 1e-4}, reason="Adam, and the bias of attention's keys")
# Noise of 1e-7 in the UNet's parameters changes these images by up to 6 levels of 255; sampled in fp32, by one.
BF16 = Tolerance(pixels=6, reason="images are sampled under torch.autocast, in bf16")
INSTANCES = "--instance_data_dir={data}/images"
PROGRAMS = [
    Program(
        "train_unconditional, images sampled and saved on rank 0",
        UNCONDITIONAL,
        _UNCONDITIONAL,
        ACCELERATE,
        prepare=unconditional,
        tolerance=KEYS,
    ),
    Program(
        "train_unconditional, an average's weights copied in on rank 0",
        UNCONDITIONAL,
        (*_UNCONDITIONAL, "--use_ema"),
        ACCELERATE,
        prepare=unconditional,
        ranks=3,
        tolerance=KEYS,
    ),
    Program(
        "train_unconditional, save_state on rank 0, then resumed",
        UNCONDITIONAL,
        (*_UNCONDITIONAL, "--checkpointing_steps=3"),
        ACCELERATE,
        then=[(*_UNCONDITIONAL, "--checkpointing_steps=3", "--num_epochs=3", "--resume_from_checkpoint=latest")],
        prepare=unconditional,
        tolerance=KEYS,
    ),
    Program(
        "train_text_to_image, validation on rank 0",
        TEXT_TO_IMAGE,
        text_to_image("--validation_prompts", "a b", "--validation_epochs=1", "--gradient_accumulation_steps=2"),
        ACCELERATE,
        prepare=captioned,
        tolerance=BF16,
    ),
    Program(
        "train_text_to_image_lora, validation on rank 0",
        example("text_to_image/train_text_to_image_lora.py", "6634df6b80bc428a"),
        text_to_image("--validation_prompt=a b", "--validation_epochs=1", "--num_validation_images=1", "--rank=2"),
        ACCELERATE,
        prepare=captioned,
    ),
    Program(
        "train_text_to_image_lora in bf16, which ends with a conversion on rank 0",
        example("text_to_image/train_text_to_image_lora.py", "6634df6b80bc428a"),
        text_to_image("--rank=2", "--mixed_precision=bf16"),
        ACCELERATE,
        prepare=captioned,
    ),
    Program(
        "train_dreambooth, text encoder trained too",
        example("dreambooth/train_dreambooth.py", "29a648820226e7df"),
        text_to_image("--instance_prompt=a b", "--train_text_encoder", data=INSTANCES),
        ACCELERATE,
        prepare=instances,
        tolerance=KEYS,
    ),
    Program(
        "train_dreambooth_lora",
        example("dreambooth/train_dreambooth_lora.py", "89cd066f65b2c5d4"),
        text_to_image("--instance_prompt=a b", "--rank=2", data=INSTANCES),
        ACCELERATE,
        prepare=instances,
    ),
    Program(
        "train_dreambooth_lora in bf16, which ends with a conversion on rank 0",
        example("dreambooth/train_dreambooth_lora.py", "89cd066f65b2c5d4"),
        text_to_image("--instance_prompt=a b", "--rank=2", "--mixed_precision=bf16", data=INSTANCES),
        ACCELERATE,
        prepare=instances,
    ),
    Program(
        "train_controlnet, validation on rank 0",
        example("controlnet/train_controlnet.py", "a8418d2db018a4ff"),
        text_to_image(
            "--controlnet_model_name_or_path={data}/pretrained/controlnet", "--validation_prompt", "a b",
            "--validation_image", "{data}/images/image000.png", "--validation_steps=3", "--num_validation_images=1",
        ),
        ACCELERATE,
        prepare=conditioned,
    ),
    Program(
        "textual_inversion, rows of the embedding restored after each step",
        example("textual_inversion/textual_inversion.py", "7577661c8a3d6c19"),
        text_to_image(
            "--placeholder_token=<c>", "--initializer_token=a", "--num_vectors=2", "--learnable_property=object",
            "--repeats=4", "--save_steps=3",
        ),
        ACCELERATE,
        prepare=instances,
    ),
    Program(
        "train_instruct_pix2pix",
        example("instruct_pix2pix/train_instruct_pix2pix.py", "a20e06f8a91eded5"),
        text_to_image(
            "--original_image_column=input_image", "--edited_image_column=edited_image",
            "--edit_prompt_column=edit_prompt", "--conditioning_dropout_prob=0.05",
        ),
        ACCELERATE,
        prepare=edited,
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
