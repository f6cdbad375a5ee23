"""``model.generate`` of a sharded model: the stock model's text on every rank, however long each rank's is."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_shard import ShardPlugin
from accelerate_shard.models import generation
from tests.accelerate.support.accelerators import OURS, STOCK, accelerator, engine_of
from tests.support.hf_models import VOCAB, build
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks


def text(model: nn.Module, rank: int, **options: Any) -> torch.Tensor:
    """What ``generate`` gives, with prompts and outputs of another length on each rank."""
    ids = torch.randint(3, VOCAB, (2, 3 + 2 * rank), generator=torch.Generator().manual_seed(rank))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4 + 5 * rank}
    torch.manual_seed(7 + rank)
    return model.generate(**{**given, "do_sample": False, "pad_token_id": 0, **options})


@contextlib.contextmanager
def too_little_memory() -> Any:
    """No rank has room for the whole model."""
    kept = generation.available
    generation.available = lambda device: 0
    try:
        yield
    finally:
        generation.available = kept


WAYS = {"gathered": contextlib.nullcontext, "token by token": too_little_memory}


GREEDY: dict[str, Any] = {}
TEXTS = {
    "greedy": ("gpt2", GREEDY),
    "beams": ("gpt2", {"num_beams": 3, "num_return_sequences": 2}),
    "encoder and decoder": ("t5", GREEDY),
    "llama": ("llama", GREEDY),
    "bart": ("bart", GREEDY),
    "sampling": ("gpt2", {"do_sample": True, "top_k": 5}),
    "sampled beams": ("gpt2", {"do_sample": True, "num_beams": 2}),
}


@pytest.mark.parametrize("case", quick(TEXTS, ["greedy", "beams", "encoder and decoder"]))
@ranks(2)
def test_text_is_the_stock_model_s_on_ranks_of_different_lengths(rank: int, case: str) -> None:
    name, options = TEXTS[case]
    wanted = text(build(name)[0].eval(), rank, **options)
    with accelerator(OURS) as acc:
        model = acc.prepare(build(name)[0]).eval()
        for way in WAYS.values():
            with way():
                assert torch.equal(text(model, rank, **options), wanted)
        # As Seq2SeqTrainer passes it.
        assert torch.equal(text(acc.unwrap_model(model), rank, synced_gpus=False, **options), wanted)


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_the_main_rank_may_generate_alone(rank: int, way: str) -> None:
    wanted = text(build("gpt2")[0].eval(), rank)
    model, inputs, loss = build("gpt2")
    with accelerator(OURS) as acc:
        model = acc.prepare(model).eval()
        if acc.is_main_process:
            with WAYS[way]():
                assert torch.equal(text(model, rank), wanted)
        acc.backward(loss(model(**inputs)))  # where the other rank has gone on to


@ranks(2)
def test_parameters_are_sent_once_for_the_whole_text(rank: int) -> None:
    with accelerator(OURS) as acc:
        model = acc.prepare(build("gpt2")[0])
        engine = engine_of(model)
        before = engine.bytes_sent
        with engine.gathered():
            pass
        once = engine.bytes_sent - before
        text(model, rank)
        assert engine.bytes_sent - before == 2 * once
        with engine.gathered():
            text(model, rank)
            text(model, rank)
        assert engine.bytes_sent - before == 3 * once
        assert engine.memory_summary()["gathered"] == 0


@pytest.mark.parametrize("strategy", ["shard_optim", *exhaustive("no_shard")])
@ranks(2)
def test_it_is_safe_where_parameters_are_whole_anyway(rank: int, strategy: str) -> None:
    wanted = text(build("gpt2")[0], rank)
    with accelerator(OURS, shard_plugin=ShardPlugin(strategy=strategy)) as acc:
        model, inputs, loss = build("gpt2")
        model = acc.prepare(model)
        assert torch.equal(text(model, rank), wanted)
        acc.backward(loss(model(**inputs)))  # where ranks would find that they did different things


@pytest.mark.parametrize("way", quick(WAYS, ["gathered"]))
@ranks(2)
def test_mixed_precision_generates_as_stock(rank: int, way: str) -> None:
    def scores(kind: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with accelerator(kind, mixed_precision="bf16") as acc:
            model = acc.unwrap_model(acc.prepare(build("gpt2")[0]))
            with WAYS[way]():
                out = text(model, rank, return_dict_in_generate=True, output_scores=True)
            return out.sequences, out.scores

    (wanted, stock), (found, ours) = scores(STOCK), scores(OURS)
    assert torch.equal(found, wanted)
    torch.testing.assert_close(ours, stock)


@pytest.mark.exhaustive
@ranks(2)
def test_an_assistant_model_that_is_sharded_too_is_gathered(rank: int) -> None:
    plain, helper = build("llama")[0].eval(), build("llama", seed=1)[0].eval()
    ids = torch.arange(3, 6 + 2 * rank)[None]
    options: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = text(plain, rank, assistant_model=helper, **options)
    with accelerator(OURS) as acc:
        model, helper = acc.prepare(build("llama")[0].eval(), build("llama", seed=1)[0].eval())
        assert torch.equal(text(model, rank, assistant_model=helper, **options), wanted)
