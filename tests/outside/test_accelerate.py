"""Accelerate's examples and the test scripts that it brings in its package."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched, Packaged

COMMIT = "16cb6eb80dd9"
KEYS = Tolerance(noise={"*.key.bias": 1e-4}, reason="Adam, and the bias of attention's keys")


def example(path: str, digest: str, needs: Sequence[str] = ()) -> Fetched:
    return Fetched("huggingface/accelerate", COMMIT, f"examples/{path}", digest, needs)


def script(path: str) -> Packaged:
    return Packaged("accelerate", f"test_utils/scripts/{path}")


def paraphrases(folder: Path) -> None:
    """Make MRPC and BERT, where `load_dataset` and `from_pretrained` find them by name."""
    makers.bert(folder / "work/bert-base-cased")
    for split, count in (("train", 96), ("validation", 40), ("test", 8)):
        found = [{"sentence1": words(n), "sentence2": words(n + n % 2), "label": n % 2, "idx": n} for n in range(count)]
        makers.rows(folder / f"work/nyu-mll/glue/mrpc/{split}.jsonl", found)
    lines = "".join(f"  - split: {s}\n    path: mrpc/{s}.jsonl\n" for s in ("train", "validation", "test"))
    readme = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{lines}---\n"
    (folder / "work/nyu-mll/glue/README.md").write_text(readme)


def on_paraphrases(
    name: str,
    source: Fetched | Packaged,
    *arguments: str,
    then: Sequence[Sequence[str]] = (),
    refused: str | None = None,
) -> Program:
    return Program(
        name, source, arguments, ACCELERATE, then=then, prepare=paraphrases, stand_ins=["local_metrics"], tolerance=KEYS,
        refused=refused,
    )  # fmt: skip


PROGRAMS = [
    on_paraphrases("accelerate nlp_example", example("nlp_example.py", "199f1d6d2b38bf2b")),
    on_paraphrases(
        "accelerate complete_nlp_example, checkpoints, tracked, then resumed",
        example("complete_nlp_example.py", "5e76c87dd371004a"),
        "--checkpointing_steps=epoch", "--output_dir=out", "--with_tracking", "--project_dir=logs",
        then=[["--resume_from_checkpoint=out/epoch_0", "--output_dir=out"]],
    ),
    on_paraphrases(
        "accelerate by_feature/gradient_accumulation",
        example("by_feature/gradient_accumulation.py", "b7fb15066d3953d1"),
        "--gradient_accumulation_steps=2",
    ),
    on_paraphrases("accelerate by_feature/early_stopping", example("by_feature/early_stopping.py", "300acf6b8bd29ea3")),
    on_paraphrases("accelerate by_feature/cross_validation", example("by_feature/cross_validation.py", "aeebe9eb9dd09fcb")),
    on_paraphrases(
        "accelerate by_feature/ddp_comm_hook",
        example("by_feature/ddp_comm_hook.py", "9f91ae5816a15ea7"),
        "--ddp_comm_hook=fp16",
    ),
    on_paraphrases("accelerate by_feature/memory", example("by_feature/memory.py", "b45d0d037379bca8")),
    on_paraphrases(
        "accelerate test_checkpointing, then resumed",
        script("external_deps/test_checkpointing.py"),
        "--output_dir=.", "--partial_train_epoch=1", "--model_name_or_path=bert-base-cased",
        then=[["--output_dir=.", "--resume_from_checkpoint=epoch_0", "--model_name_or_path=bert-base-cased"]],
    ),
    Program("accelerate test_script", script("test_script.py"), (), ACCELERATE),
    Program(
        # It asserts that no gradient is reduced within no_sync, which is a setting here.
        "accelerate test_sync, with SHARD_DEFER_GRADIENT_SYNC=true",
        script("test_sync.py"), (), ACCELERATE, environment={"SHARD_DEFER_GRADIENT_SYNC": "true"},
        tolerance=Tolerance(losses=(0.0, math.inf), reason="its data are others in each run; it asserts the gradients itself"),
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
