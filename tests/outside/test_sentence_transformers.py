"""Example programs of sentence-transformers, and a script of ours that saves on rank 0 alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched, Own

KEYS = Tolerance(noise={"*.key.bias": 1e-4}, reason="Adam, and the bias of attention's keys")
WRITTEN_TWICE = {
    "*README.md": "each rank writes it, since transformers 5 calls Trainer._save on each, and rank 0 alone knows of metrics",
    "*training_args.bin": "each rank writes it, and its own rank into it",
    "*rng_state_1.pth": "it is in another folder where the ranks have named theirs by different seconds",
}
RANKED = Tolerance(
    noise={**KEYS.noise, "*spearman*": 0.1},
    reason="Adam, and the bias of attention's keys; the order of similarities that are nearly equal",
)


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


NANO_BEIR = (
    "ArguAna", "ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ", "QuoraRetrieval",
    "SCIDOCS", "SciFact", "Touche2020",
)  # fmt: skip


def nano_beir(folder: Path) -> None:
    """Make the collection that evaluators read by name: of each data set documents, queries, and what BM25 might find."""
    found = folder / "work/sentence-transformers/NanoBEIR-en"
    documents = [f"d{n}" for n in range(20)]
    for seed, name in enumerate(NANO_BEIR):
        texts = [words(1000 * seed + n) for n in range(26)]
        tables = {
            "corpus": [{"_id": d, "text": text} for d, text in zip(documents, texts, strict=False)],
            "queries": [{"_id": f"q{n}", "text": text} for n, text in enumerate(texts[20:])],
            "qrels": [{"query-id": f"q{n}", "corpus-id": d} for n in range(6) for d in documents[n : n + 3]],
            "bm25": [{"query-id": f"q{n}", "corpus-ids": documents[n:] + documents[:n]} for n in range(6)],
        }
        for table, lines in tables.items():
            makers.rows(found / f"{table}/Nano{name}.jsonl", lines)
    splits = {
        table: "".join(f"  - split: Nano{name}\n    path: {table}/Nano{name}.jsonl\n" for name in NANO_BEIR)
        for table in tables
    }
    configurations = "".join(f"- config_name: {table}\n  data_files:\n{lines}" for table, lines in splits.items())
    (found / "README.md").write_text(f"---\nconfigs:\n{configurations}---\n")


def answers(folder: Path) -> None:
    """Make Natural Questions: 52 steps of both ranks, beside the thousand rows that the program evaluates."""
    makers.bert(folder / "work/microsoft/mpnet-base")
    found = [{"query": words(n, 6), "answer": words(50_000 + n)} for n in range(52 * 2 * 256 + 1000)]
    makers.rows(folder / "work/sentence-transformers/natural-questions/train.jsonl", found)
    nano_beir(folder)


def pairs(folder: Path) -> None:
    makers.bert(folder / "model")
    makers.rows(folder / "pairs.jsonl", [{"anchor": words(n), "positive": words(n + 1)} for n in range(64)])


PROGRAMS = [
    Program(
        "sentence-transformers training_nli_v2 (MultipleNegativesRankingLoss), evaluated, checkpoints",
        example("sentence_transformer/training/nli/training_nli_v2.py", "05709f4d83649ff8"),
        (),
        ACCELERATE,
        names_folders_by_second=True,
        not_compared=WRITTEN_TWICE,
        prepare=entailments,
        tolerance=RANKED,
    ),
    Program(
        "sentence-transformers train_splade_stsbenchmark, bf16",
        example("sparse_encoder/training/sts/train_splade_stsbenchmark.py", "a38b92e0f2c6fa3d"),
        (),
        ACCELERATE,
        names_folders_by_second=True,
        not_compared=WRITTEN_TWICE,
        prepare=similarity,
        stand_ins=["bf16_everywhere"],
        tolerance=KEYS,
    ),
    Program(
        "sentence-transformers training_nq_prompts (CachedMultipleNegativesRankingLoss), bf16, evaluated, checkpoints",
        example("sentence_transformer/training/prompts/training_nq_prompts.py", "fa99ce1d0e24e2dc"),
        (),
        ACCELERATE,
        names_folders_by_second=True,
        not_compared=WRITTEN_TWICE,
        prepare=answers,
        stand_ins=["no_uploads", "bf16_everywhere"],
        tolerance=Tolerance(files=(1e-5, 3e-5), noise=KEYS.noise, reason="52 steps of Adam in bf16"),
        limit=1800,
    ),
    Program(
        "sentence-transformers training_stsbenchmark (CrossEncoder), bf16, evaluated, saved",
        example("cross_encoder/training/sts/training_stsbenchmark.py", "d6a574a47db87e08"),
        (),
        dataclasses.replace(ACCELERATE, ddp_stand_ins=["ddp_uses_all"]),
        names_folders_by_second=True,
        not_compared=WRITTEN_TWICE,
        prepare=similarity,
        stand_ins=["no_uploads", "bf16_everywhere"],
        tolerance=RANKED,
    ),
    Program(
        "sentence-transformers, CachedMultipleNegativesRankingLoss, saved on rank 0",
        Own("library/cached_ranking_loss.py", "sentence_transformers"),
        ("{data}",),
        ACCELERATE,
        not_compared=WRITTEN_TWICE,
        prepare=pairs,
    ),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
