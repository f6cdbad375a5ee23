"""Example programs of sentence-transformers, and scripts of ours for what these leave out: its Trainer, and SetFit's."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched, Own

KEYS = Tolerance(noise={"*.key.bias": 1e-4}, reason="Adam, and the bias of attention's keys")


def example(path: str, digest: str) -> Fetched:
    return Fetched("huggingface/sentence-transformers", "cad21198", f"examples/{path}", digest)


def similarity(folder: Path, rows: int = 256) -> None:
    """Make the STS benchmark and pretrained models, where programs find them by name."""
    for name in ("distilbert/distilroberta-base", "distilbert/distilbert-base-uncased"):
        makers.bert(folder / "work" / name)
    makers.bert(folder / "work/naver/splade-cocondenser-ensembledistil", masked=True)
    for split, count in (("train", rows), ("validation", 40), ("test", 40)):
        found = [{"sentence1": words(n), "sentence2": words(n + n % 3), "score": (n % 5) / 4} for n in range(count)]
        makers.rows(folder / f"work/sentence-transformers/stsb/{split}.jsonl", found)


def entailments(folder: Path) -> None:
    similarity(folder, rows=8)
    for split, count in (("train", 10000), ("dev", 1000)):
        found = [{"anchor": words(n), "positive": words(n + 1), "negative": words(n + 2)} for n in range(count)]
        makers.rows(folder / f"work/sentence-transformers/all-nli/triplet/{split}.jsonl", found)
    lines = "".join(f"  - split: {split}\n    path: triplet/{split}.jsonl\n" for split in ("train", "dev"))
    readme = f"---\nconfigs:\n- config_name: triplet\n  data_files:\n{lines}---\n"
    (folder / "work/sentence-transformers/all-nli/README.md").write_text(readme)


def questions(folder: Path) -> None:
    makers.bert(folder / "work/sentence-transformers/all-distilroberta-v1")
    for split, count in (("train", 900), ("test", 60)):
        found = [{"text": words(n), "coarse_label": n % 3, "fine_label": n % 6} for n in range(count)]
        makers.rows(folder / f"work/omkar334/trec/{split}.jsonl", found)


def pairs(folder: Path) -> None:
    makers.bert(folder / "model")
    makers.rows(folder / "pairs.jsonl", [{"anchor": words(n), "positive": words(n + 1)} for n in range(64)])
    makers.rows(folder / "labels.jsonl", [{"text": words(n), "label": n % 2} for n in range(16)])


PROGRAMS = [
    Program(
        "sentence-transformers training_batch_hard_trec, evaluated, checkpoints",
        example("sentence_transformer/training/other/training_batch_hard_trec.py", "771bef975cdba82a"),
        (),
        ACCELERATE,
        prepare=questions,
        tolerance=KEYS,
    ),
    Program(
        "sentence-transformers training_nli_v2 (MultipleNegativesRankingLoss), evaluated, checkpoints",
        example("sentence_transformer/training/nli/training_nli_v2.py", "05709f4d83649ff8"),
        (),
        ACCELERATE,
        prepare=entailments,
        tolerance=KEYS,
    ),
    Program(
        "sentence-transformers training_stsbenchmark of a CrossEncoder, bf16",
        example("cross_encoder/training/sts/training_stsbenchmark.py", "d6a574a47db87e08"),
        (),
        ACCELERATE,
        prepare=similarity,
        tolerance=KEYS,
    ),
    Program(
        "sentence-transformers train_splade_stsbenchmark, bf16",
        example("sparse_encoder/training/sts/train_splade_stsbenchmark.py", "a38b92e0f2c6fa3d"),
        (),
        ACCELERATE,
        prepare=similarity,
        tolerance=KEYS,
    ),
    Program(
        "sentence-transformers, CachedMultipleNegativesRankingLoss, saved on rank 0",
        Own("library/cached_ranking_loss.py", "sentence_transformers"),
        ("{data}",),
        ACCELERATE,
        prepare=pairs,
    ),
    Program("setfit, saved", Own("library/few_shot.py", "setfit"), ("{data}",), ACCELERATE, prepare=pairs),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
