"""SetFit's program for few-shot runs, which saves scores alone, and a script of ours that saves the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Copied, Fetched, Own

KEYS = Tolerance(noise={"*.key.bias": 1e-4}, reason="Adam, and the bias of attention's keys")


def script(path: str, digest: str) -> Fetched:
    return Fetched("huggingface/setfit", "0f8e322ce7c6", f"scripts/{path}", digest, needs=["setfit"])


FEW_SHOT = script("setfit/run_fewshot.py", "feef2eaeba805e60")
SUMMARY = script("create_summary_table.py", "efa2eb284133bbb9")  # is imported from the folder above


def sentiments(folder: Path) -> None:
    """Make SST2, where `load_dataset` finds it by name, and copy the program: it writes beside itself."""
    makers.bert(folder / "work/tiny-mpnet")
    for split, count in (("train", 80), ("test", 20)):
        found = [
            {"text": words(n), "label": n % 2, "label_text": ("negative", "positive")[n % 2]} for n in range(count)
        ]
        makers.rows(folder / f"work/SetFit/sst2/{split}.jsonl", found)
    (folder / "work/scripts/setfit").mkdir(parents=True)
    shutil.copy(FEW_SHOT.command()[0], folder / "work/scripts/setfit")
    shutil.copy(SUMMARY.command()[0], folder / "work/scripts")


def labels(folder: Path) -> None:
    makers.bert(folder / "model")
    makers.rows(folder / "labels.jsonl", [{"text": words(n), "label": n % 2} for n in range(16)])


WRITTEN_TWICE = {"*training_args.bin": "each rank writes it, and its own rank into it"}

PROGRAMS = [
    Program(
        "setfit run_fewshot: ten models of one process, one after the other",
        Copied(FEW_SHOT, "scripts/setfit/run_fewshot.py"),
        ("--model=tiny-mpnet", "--datasets=sst2", "--sample_sizes=8", "--num_iterations=2", "--batch_size=8"),
        ACCELERATE,
        prepare=sentiments,
        stand_ins=["local_metrics"],
        not_compared={
            "checkpoints/runs/*": "the ten models' folders are named by the second, which some share",
            **WRITTEN_TWICE,
        },
    ),
    Program(
        "setfit, checkpoints, saved",
        Own("library/few_shot.py", "setfit"),
        ("{data}",),
        ACCELERATE,
        prepare=labels,
        stand_ins=["local_metrics"],
        not_compared=WRITTEN_TWICE,
        tolerance=KEYS,
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
