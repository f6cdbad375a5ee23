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


def prompt(rank: int, length: int | None = None) -> torch.Tensor:
    """A prompt of another length on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(3, VOCAB, (2, length or 3 + 2 * rank), generator=generator)


def arguments(rank: int, **options: Any) -> dict[str, Any]:
    """Of a ``generate`` whose output has another length on each rank, too."""
    ids = prompt(rank)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 4 + 5 * rank}
    return {**given, "do_sample": False, "pad_token_id": 0, **options}


def text(model: nn.Module, rank: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(7 + rank)
    return model.generate(**arguments(rank, **options))


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", *exhaustive("llama")])
@ranks(2)
def test_greedy_text_is_the_stock_model_s_on_ranks_of_different_lengths(rank: int, name: str, way: str) -> None:
    wanted = text(build(name)[0], rank)
    with accelerator(OURS) as acc, WAYS[way]():
        model = acc.prepare(build(name)[0])
        assert torch.equal(text(model, rank), wanted)
        assert torch.equal(
            text(acc.unwrap_model(model), rank, synced_gpus=False), wanted
        )  # as Seq2SeqTrainer passes it


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


@pytest.mark.parametrize(
    "options",
    [
        *exhaustive({"do_sample": True, "top_k": 5}),
        {"num_beams": 3, "num_return_sequences": 2},
        *exhaustive({"do_sample": True, "num_beams": 2}),
    ],
    ids=["sampling", "beams", "sampled beams"],
)
@ranks(2)
def test_other_ways_of_decoding_are_as_stock(rank: int, options: dict[str, Any]) -> None:
    wanted = text(build("gpt2")[0], rank, **options)
    with accelerator(OURS) as acc:
        model = acc.prepare(build("gpt2")[0])
        assert torch.equal(text(model, rank, **options), wanted)
        with too_little_memory():
            assert torch.equal(text(model, rank, **options), wanted)


@pytest.mark.parametrize("name", ["t5", *exhaustive("bart")])
@ranks(2)
def test_encoder_and_decoder_generate_as_stock(rank: int, name: str) -> None:
    wanted = text(build(name)[0].eval(), rank)
    with accelerator(OURS) as acc:
        model = acc.prepare(build(name)[0]).eval()
        assert torch.equal(text(model, rank), wanted)
        with too_little_memory():
            assert torch.equal(text(model, rank), wanted)


@pytest.mark.parametrize("strategy", ["shard_optim", *exhaustive("shard_grad_op", "no_shard")])
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
    # Token by token the engine gathers in bf16 what autocast itself leaves in fp32 (embeddings), as it does in training.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if way == "gathered" else {"rtol": 0, "atol": 4e-3}
    torch.testing.assert_close(ours, stock, **tolerance)


@pytest.mark.exhaustive
@ranks(2)
def test_an_assistant_model_that_is_sharded_too_is_gathered(rank: int) -> None:
    plain, helper = build("llama")[0].eval(), build("llama", seed=1)[0].eval()
    options: dict[str, Any] = {"input_ids": prompt(rank)[:1], "attention_mask": torch.ones_like(prompt(rank)[:1])}
    wanted = text(plain, rank, assistant_model=helper, **options)
    with accelerator(OURS) as acc:
        model, helper = acc.prepare(build("llama")[0].eval(), build("llama", seed=1)[0].eval())
        assert torch.equal(text(model, rank, assistant_model=helper, **options), wanted)
