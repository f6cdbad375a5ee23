"""Example programs of diffusers, for Accelerate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .support import makers
from .support.program import ACCELERATE, Program
from .support.sources import Outside


def _images_and_unet(folder: Path) -> None:
    makers.images(folder / "images", 16)
    (folder / "unet").mkdir()
    (folder / "unet" / "config.json").write_text(
        json.dumps(
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
            }
        )
    )


UNCONDITIONAL = Outside("diffusers/train_unconditional.py", "0314b03f4fa7eed8")
_UNCONDITIONAL = (
    "--train_data_dir={data}/images", "--model_config_name_or_path={data}/unet", "--output_dir=out", "--resolution=16",
    "--train_batch_size=2", "--eval_batch_size=2", "--num_epochs=2", "--save_images_epochs=1", "--save_model_epochs=2",
    "--lr_warmup_steps=2", "--learning_rate=1e-3", "--ddpm_num_steps=10", "--ddpm_num_inference_steps=3",
)  # fmt: skip

PROGRAMS = [
    Program(
        "train_unconditional, images sampled and saved on rank 0",
        UNCONDITIONAL,
        _UNCONDITIONAL,
        ACCELERATE,
        prepare=_images_and_unet,
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
