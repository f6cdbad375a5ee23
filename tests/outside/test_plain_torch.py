"""Programs that use DistributedDataParallel themselves."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy
import pytest

from .support import makers
from .support.program import TORCHRUN, Program
from .support.sources import Outside


def _tokens(folder: Path) -> None:
    draw = numpy.random.default_rng(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        draw.integers(0, 60, count).astype(numpy.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _classes(folder: Path) -> None:
    for part, count in (("train", 12), ("validation", 7)):
        for name in ("cat", "dog"):
            makers.images(folder / part / name, count)


NANOGPT = Outside("nanogpt/train.py", "413bd97b40bb400a")
_NANOGPT = (
    "--dataset={data}", "--backend=gloo", "--out_dir=out", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=4", "--eval_interval=5", "--eval_iters=3", "--log_interval=1",
    "--dtype=float32", "--warmup_iters=2", "--lr_decay_iters=12",
)  # fmt: skip
TIMM = Outside("timm/train.py", "f0bb70b9e1c8c576")
_TIMM = (
    "--data-dir={data}", "--img-size=32", "--num-classes=2", "--batch-size=4", "--epochs=2",
    "--workers=0", "--device=cpu", "--no-prefetcher", "--opt=adamw", "--lr=1e-3", "--sched=cosine", "--warmup-epochs=0",
    "--output=out", "--experiment=tiny",
)  # fmt: skip
# Keys' biases have no gradient but rounding, which AdamW would make steps of without a larger epsilon.
_VIT = ("--model-kwargs", "img_size=32", "depth=2", "embed_dim=32", "num_heads=2", "patch_size=8")

PROGRAMS = [
    Program(
        "nanoGPT's train.py: rank 0 evaluates and saves; resumed",
        NANOGPT,
        (*_NANOGPT, "--compile=False", "--max_iters=12"),
        TORCHRUN,
        then=[(*_NANOGPT, "--compile=False", "--max_iters=17", "--init_from=resume")],
        prepare=_tokens,
        beside=["configurator.py"],
        stand_ins=["cpu_as_cuda"],
    ),
    Program(
        "timm's train.py: a transformer, averaged weights, checkpoints of rank 0",
        TIMM,
        (*_TIMM, "--model=vit_tiny_patch16_224", "--model-ema", "--clip-grad=1.0", "--opt-eps=1e-3", *_VIT),
        TORCHRUN,
        prepare=_classes,
        stand_ins=["cpu_as_cuda"],
    ),
    Program(
        "timm's train.py: a convolutional network, its statistics averaged over the ranks, accumulation",
        TIMM,
        (*_TIMM, "--model=test_resnet", "--dist-bn=reduce", "--grad-accum-steps=2", "--opt=sgd"),
        TORCHRUN,
        prepare=_classes,
        stand_ins=["cpu_as_cuda"],
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
