"""F5-TTS's training script: rank 0 alone keeps an average of the model, saves, and draws samples from the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program
from .support.sources import Fetched

TRAIN = Fetched(
    "SWivid/F5-TTS",
    "2ae2c9bd9b64",
    "src/f5_tts/train/train.py",
    "4ce652616480e39d",
    needs=["ema_pytorch", "librosa", "matplotlib", "pydub", "rjieba", "torchaudio", "torchdiffeq", "vocos", "wandb"],
)
_VOCODER = {
    "feature_extractor": {"class_path": "vocos.feature_extractors.MelSpectrogramFeatures", "init_args": {}},
    "backbone": {
        "class_path": "vocos.models.VocosBackbone",
        "init_args": {"input_channels": 100, "dim": 16, "intermediate_dim": 32, "num_layers": 1},
    },
    "head": {"class_path": "vocos.heads.ISTFTHead", "init_args": {"dim": 16, "n_fft": 1024, "hop_length": 256}},
}
_MAKE_VOCODER = """
import sys, torch, vocos
torch.manual_seed(8)
torch.save(vocos.Vocos.from_hparams(sys.argv[1] + "/config.yaml").state_dict(), sys.argv[1] + "/pytorch_model.bin")
"""


def sentences(folder: Path) -> None:
    """Make a data set, a vocoder, and a copy of the package: the program writes beside it."""
    import datasets

    package = Path(TRAIN.command()[0]).parents[1]
    shutil.copytree(package, folder / "work/src/f5_tts", ignore=shutil.ignore_patterns("__pycache__"))
    found = [{"audio_path": f"{n}.wav", "text": words(n, 4), "duration": 0.6} for n in range(24)]
    data = folder / "work/data/tiny_byte"
    datasets.Dataset.from_list(found).save_to_disk(data / "raw")
    makers.json_file(data / "duration.json", {"duration": [0.6] * 24})
    makers.json_file(folder / "vocos/config.yaml", _VOCODER)
    paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.environ.get("OUTSIDE_PACKAGES"))))
    line = [sys.executable, "-c", _MAKE_VOCODER, str(folder / "vocos")]
    subprocess.run(line, check=True, env={**os.environ, "PYTHONPATH": paths})


PROGRAMS = [
    Program(
        "F5-TTS's train.py: an average, checkpoints and samples of rank 0",
        TRAIN,
        (
            "--config-name=F5TTS_v1_Small", "datasets.name=tiny", "datasets.batch_size_type=sample",
            "datasets.batch_size_per_gpu=2", "datasets.num_workers=1", "optim.epochs=2", "optim.num_warmup_updates=2",
            "model.tokenizer=byte", "model.arch.dim=32", "model.arch.depth=2", "model.arch.heads=2", "model.arch.text_dim=16",
            "model.arch.conv_layers=1", "model.vocoder.is_local=true", "model.vocoder.local_path={data}/vocos",
            "ckpts.logger=tensorboard", "ckpts.save_per_updates=6", "ckpts.last_per_updates=12", "ckpts.save_dir=saved",
            "hydra.run.dir=out",
        ),
        ACCELERATE,
        prepare=sentences,
        stand_ins=["made_sounds"],
        imports_from=["src"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
