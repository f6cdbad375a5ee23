"""Example programs of transformers, ``examples/pytorch``: its Trainer, as its authors use it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from .support import makers
from .support.makers import words
from .support.program import ACCELERATE, Program, Tolerance
from .support.sources import Fetched

COMMIT = "5a67f0a7aca8"
KEYS = Tolerance(noise={"*.key.bias": 1e-4}, reason="Adam, and the bias of attention's keys")
# GPT-2 has the biases of queries, keys and values in one parameter.
FUSED_KEYS = Tolerance(noise={"*.c_attn.bias": 1e-4}, reason="Adam, and the bias of attention's keys")


def example(path: str, digest: str, needs: Sequence[str] = ()) -> Fetched:
    return Fetched("huggingface/transformers", COMMIT, f"examples/pytorch/{path}", digest, needs)


def texts(folder: Path) -> None:
    makers.language_model(folder / "model")
    for name, first, count in (("train", 0, 60), ("validation", 500, 22)):
        (folder / f"{name}.txt").write_text("".join(f"{words(first + n)}\n" for n in range(count)))


def paraphrases(folder: Path) -> None:
    """Make MRPC, where `load_dataset` finds it by name; the program asks for the names of its labels."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    makers.bert(folder / "model")
    label = datasets.ClassLabel(names=["not_equivalent", "equivalent"])
    text, number = datasets.Value("string"), datasets.Value("int32")
    features = datasets.Features({"sentence1": text, "sentence2": text, "label": label, "idx": number})
    glue = folder / "work/nyu-mll/glue"
    (glue / "mrpc").mkdir(parents=True)
    # No multiple of the rows that both ranks evaluate at once: the last ones of all ranks are cut.
    for split, count in (("train", 48), ("validation", 21), ("test", 13)):
        found = [{"sentence1": words(n), "sentence2": words(n + n % 2), "label": n % 2, "idx": n} for n in range(count)]
        table = pyarrow.Table.from_pylist(found, schema=features.arrow_schema)
        pyarrow.parquet.write_table(table, glue / f"mrpc/{split}.parquet")
    lines = "".join(f"  - split: {s}\n    path: mrpc/{s}.parquet\n" for s in ("train", "validation", "test"))
    (glue / "README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{lines}---\n")


def summaries(folder: Path) -> None:
    """Make texts with summaries, and the data of nltk's tokenizer of sentences, which knows no abbreviation then."""
    makers.t5(folder / "model")
    for split, first, count in (("train", 0, 48), ("validation", 500, 13), ("test", 600, 9)):
        found = [{"text": words(first + n, 10), "summary": words(first + n, 4)} for n in range(count)]
        makers.rows(folder / f"{split}.json", found)
    tokenizers = folder / "nltk_data/tokenizers"
    (tokenizers / "punkt").mkdir(parents=True)  # is only asked for
    (tokenizers / "punkt_tab/english").mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (tokenizers / "punkt_tab/english" / name).write_text("")


def arguments(*more: str) -> Sequence[str]:
    return (
        "--output_dir=out", "--do_train", "--do_eval", "--max_steps=4", "--per_device_train_batch_size=4",
        "--per_device_eval_batch_size=4", "--logging_steps=1", "--save_steps=2", "--eval_strategy=steps", "--eval_steps=2",
        "--learning_rate=1e-3", "--report_to=none", "--use_cpu=true", *more,
    )  # fmt: skip


CLM = example("language-modeling/run_clm.py", "d55f4705f486c6a0")
GLUE = example("text-classification/run_glue.py", "483b2d0d65433017")
SUMMARIZATION = example("summarization/run_summarization.py", "f3db2bb17bfafe88", needs=["nltk"])
_TEXTS = ("--train_file={data}/train.txt", "--validation_file={data}/validation.txt", "--block_size=16")
_LLAMA = arguments(*_TEXTS, "--model_name_or_path={data}/model", "--gradient_accumulation_steps=2")
_SUMMARIES = tuple(f"--{split}_file={{data}}/{split}.json" for split in ("train", "validation", "test"))

PROGRAMS = [
    Program(
        "transformers run_clm, evaluated, accumulating, then resumed",
        CLM,
        _LLAMA,
        ACCELERATE,
        then=[(*_LLAMA, "--max_steps=6", "--resume_from_checkpoint=out/checkpoint-4")],
        prepare=texts,
        stand_ins=["local_metrics"],
    ),
    Program(
        "transformers run_clm of a new GPT-2, gradients checkpointed",
        CLM,
        arguments(
            *_TEXTS, "--model_type=gpt2", "--tokenizer_name={data}/model", "--gradient_checkpointing",
            "--config_overrides=n_embd=32,n_layer=2,n_head=2,n_positions=64,vocab_size=54,bos_token_id=2,eos_token_id=3",
        ),
        ACCELERATE,
        prepare=texts,
        stand_ins=["local_metrics"],
        tolerance=FUSED_KEYS,
    ),
    Program(
        "transformers run_glue, evaluated, predicting, the best checkpoint loaded at the end",
        GLUE,
        arguments(
            "--model_name_or_path={data}/model", "--task_name=mrpc", "--max_seq_length=32", "--pad_to_max_length=false",
            "--do_predict", "--load_best_model_at_end", "--metric_for_best_model=loss", "--save_total_limit=1",
        ),
        ACCELERATE,
        prepare=paraphrases,
        stand_ins=["local_metrics"],
        tolerance=KEYS,
    ),
    Program(
        "transformers run_summarization: beam search by all ranks in evaluations and predictions",
        SUMMARIZATION,
        arguments(
            "--model_name_or_path={data}/model", *_SUMMARIES, "--text_column=text", "--summary_column=summary",
            "--max_source_length=16", "--max_target_length=8", "--num_beams=3", "--predict_with_generate", "--do_predict",
        ),
        ACCELERATE,
        prepare=summaries,
        stand_ins=["local_metrics"],
        environment={"NLTK_DATA": "{data}/nltk_data"},
        imports_from=["."],  # with OUTSIDE_PACKAGES, for nltk
    ),
]  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_program(program, outside):
    outside.check(program)
