"""Loading a large model takes a rank's shard and little more: peaks of anonymous memory, while it is loaded and sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import torch_shard
from accelerate_shard import from_pretrained
from tests.accelerate.support.accelerators import OURS, accelerator
from tests.support.peak_memory import peak, return_freed_memory
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"),
]
LAYERS, WIDTH = 12, 320


def config(experts: int) -> transformers.PreTrainedConfig:
    size = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 4, "intermediate_size": WIDTH if experts else 4 * WIDTH}
    if not experts:
        return transformers.LlamaConfig(**size)
    return transformers.MixtralConfig(**size, num_local_experts=experts, num_experts_per_tok=2)


@pytest.mark.parametrize(("experts", "dtype"), [(0, torch.bfloat16), (4, None)])
@ranks(2, fresh=True)
def test_a_rank_holds_its_shard_and_two_units_at_most(rank, experts, dtype, tmp_path):
    return_freed_memory()
    cls = transformers.AutoModelForCausalLM
    if rank == 0:
        model = cls.from_config(config(experts))
        model.save_pretrained(tmp_path / "model", max_shard_size="8MB")
        del model
    with accelerator(OURS) as acc:
        acc.wait_for_everyone()
        first = acc.prepare(
            from_pretrained(cls, tmp_path / "model", dtype=dtype)
        )  # what is imported and connected then
        acc.free_memory()
        torch_shard.engine_of(first).close()
        del first
        with peak() as found:
            model = acc.prepare(from_pretrained(cls, tmp_path / "model", dtype=dtype))
        engine = torch_shard.engine_of(model)
        shard = engine.memory_summary()["parameters"]
        unit = max(sum(f.layout.numel * f.shard.element_size() for f in u.flats) for u in engine.units)
        assert len(engine.units) > 6
        assert found.bytes <= shard + 2 * unit, (found.bytes, shard, unit)
