"""Programs that use DistributedDataParallel themselves."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy
import pytest

from .support import makers
from .support.program import TORCHRUN, Program, Tolerance
from .support.sources import Fetched, Outside, Packaged


def _tokens(folder: Path) -> None:
    draw = numpy.random.default_rng(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        draw.integers(0, 60, count).astype(numpy.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _clip(folder: Path) -> None:
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 8}
    text = {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    model = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}
    (folder / "clip").mkdir()
    (folder / "clip" / "open_clip_config.json").write_text(json.dumps({"model_cfg": model, "preprocess_cfg": {}}))


def _classes(folder: Path) -> None:
    for part, count in (("train", 12), ("validation", 7)):
        for name in ("cat", "dog"):
            makers.images(folder / part / name, count)


NANOGPT = Outside("nanogpt/train.py", "413bd97b40bb400a")
_NANOGPT = (
    "--dataset={data}", "--backend=gloo", "--out_dir=out", "--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=16",
    "--batch_size=4", "--gradient_accumulation_steps=6", "--eval_interval=5", "--eval_iters=3", "--log_interval=1",
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

OPEN_CLIP = Packaged("open_clip_train", module="open_clip_train.main")
_OPEN_CLIP = (
    "--model=local-dir:{data}/clip", "--dataset-type=synthetic", "--train-data=none", "--train-num-samples=24", "--batch-size=4",
    "--epochs=2", "--workers=0", "--device=cpu", "--dist-backend=gloo", "--lr=1e-3", "--eps=1e-3", "--warmup=1",
    "--name=tiny", "--log-every-n-steps=1", "--precision=fp32", "--save-most-recent",
)  # fmt: skip


def example(path: str, digest: str) -> Fetched:
    return Fetched("pytorch/examples", "77f55b912142", f"distributed/{path}", digest)


def _text(folder: Path) -> None:
    draw = numpy.random.default_rng(0)
    (folder / "input.txt").write_bytes(draw.integers(97, 120, 300).astype(numpy.uint8).tobytes())


_MINGPT = (
    "data_config.path={data}/input.txt", "data_config.block_size=8", "data_config.truncate=1.0", "gpt_config.n_layer=2",
    "gpt_config.n_head=2", "gpt_config.n_embd=16", "trainer_config.batch_size=16", "trainer_config.data_loader_workers=0",
    "trainer_config.use_amp=False", "trainer_config.save_every=1",
)  # fmt: skip


def dino(path: str, digest: str) -> Fetched:
    return Fetched("facebookresearch/dino", "7c446df5b9f4", path, digest)


def _pictures(folder: Path) -> None:
    for part, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            makers.images(folder / part / name, count, size=64)


_DINO = (
    "--data_path={data}/train", "--arch=vit_tiny", "--patch_size=32", "--out_dim=64", "--batch_size_per_gpu=2", "--epochs=2",
    "--local_crops_number=1", "--num_workers=0", "--use_fp16=false", "--output_dir=.", "--warmup_epochs=0", "--saveckp_freq=1",
)  # fmt: skip
_LINEAR = ("--data_path={data}", "--arch=vit_tiny", "--patch_size=32", "--batch_size_per_gpu=2", "--num_workers=0")

DIT = Fetched("facebookresearch/DiT", "ed81ce222909", "train.py", "b58b7632563e1485", needs=["diffusers"])
_DIT = ("--data-path={data}/train", "--model=DiT-S/8", "--num-classes=2", "--global-batch-size=4", "--num-workers=0")


def _latents(folder: Path) -> None:
    import diffusers

    _pictures(folder)
    diffusers.AutoencoderKL(
        block_out_channels=(4,) * 4,
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
    ).save_pretrained(folder / "work" / "stabilityai" / "sd-vae-ft-ema")


PROGRAMS = [
    Program(
        "nanoGPT's train.py: rank 0 evaluates and saves; resumed",
        NANOGPT,
        (*_NANOGPT, "--compile=False", "--max_iters=12"),
        TORCHRUN,
        then=[(*_NANOGPT, "--compile=False", "--max_iters=17", "--init_from=resume")],
        prepare=_tokens,
        ranks=3,
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
    Program(
        "pytorch/examples' minGPT: deep copies of both state dicts saved by rank 0; resumed",
        example("minGPT-ddp/mingpt/main.py", "76ed1d0d9af85b77"),
        (*_MINGPT, "trainer_config.max_epochs=1"),
        TORCHRUN,
        then=[(*_MINGPT, "trainer_config.max_epochs=2")],
        prepare=_text,
        tolerance=Tolerance(noise={"*.in_proj_bias": 1e-4}, reason="Adam, and the bias of attention's keys"),
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator"],
    ),
    Program(
        "pytorch/examples' DDP tutorial: a snapshot of rank 0; resumed",
        example("ddp-tutorial-series/multigpu_torchrun.py", "6b0a1568337fe206"),
        ("1", "1"),
        TORCHRUN,
        then=[("2", "1")],
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator"],
    ),
    Program(
        "open_clip's training: features of all ranks in the loss, a clamped scale, checkpoints of rank 0",
        OPEN_CLIP,
        (*_OPEN_CLIP, "--gather-with-grad", "--local-loss", "--grad-clip-norm=1.0"),
        TORCHRUN,
        prepare=_clip,
        stand_ins=["cpu_as_cuda"],
        not_compared={"logs/tiny/out.log": "it has times"},
    ),
    Program(
        "open_clip's training: static graph, gradient accumulation, checkpointed activations",
        OPEN_CLIP,
        (*_OPEN_CLIP, "--ddp-static-graph", "--accum-freq=2", "--grad-checkpointing"),
        TORCHRUN,
        prepare=_clip,
        stand_ins=["cpu_as_cuda"],
        not_compared={"logs/tiny/out.log": "it has times"},
    ),
    Program(
        "DINO's main_dino.py: a teacher averages the student's parameters, a weight-normed head, gradients clipped one by one",
        dino("main_dino.py", "74ef2afb9e16ab85"),
        _DINO,
        TORCHRUN,
        prepare=_pictures,
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator", "no_torch_hub"],
    ),
    Program(
        "DINO's main_dino.py with its own LARS, which takes norms of parameters, and a frozen last layer",
        dino("main_dino.py", "74ef2afb9e16ab85"),
        (*_DINO, "--optimizer=lars", "--lr=1.0", "--freeze_last_layer=0"),
        TORCHRUN,
        prepare=_pictures,
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator", "no_torch_hub"],
    ),
    Program(
        "DINO's eval_linear.py: a classifier of frozen features; resumed",
        dino("eval_linear.py", "747e8a8861d65fc6"),
        (*_LINEAR, "--num_labels=2", "--epochs=1"),
        TORCHRUN,
        then=[(*_LINEAR, "--num_labels=2", "--epochs=2")],
        prepare=_pictures,
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator", "no_torch_hub"],
    ),
    Program(
        "DiT's train.py: an average on every rank, both state dicts saved by rank 0, a seed for each rank",
        DIT,
        (*_DIT, "--epochs=1", "--ckpt-every=3", "--log-every=1"),
        TORCHRUN,
        prepare=_latents,
        stand_ins=["cpu_as_cuda", "cpu_as_accelerator", "script_sees_cuda"],
        not_compared={"results/*/log.txt": "it has times"},
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
