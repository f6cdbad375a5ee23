"""Loading a large model takes a rank's shard and little more: peaks of anonymous memory, while it is loaded and sharded."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import torch_shard
from accelerate_shard import from_pretrained
from tests.accelerate.support.accelerators import OURS, accelerator
from tests.checkpoint.test_full_memory import peak
from tests.support.ranks import ranks

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's smaps_rollup"),
]
LAYERS, WIDTH = 12, 320


def config(kind: str) -> transformers.PreTrainedConfig:
    size = {"vocab_size": 64, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    size |= {"num_key_value_heads": 4, "intermediate_size": 4 * WIDTH if kind == "llama" else WIDTH}
    if kind == "llama":
        return transformers.LlamaConfig(**size)
    return transformers.MixtralConfig(**size, num_local_experts=4, num_experts_per_tok=2)


@pytest.mark.parametrize(("kind", "dtype"), [("llama", None), ("llama", torch.bfloat16), ("mixtral", None)])
@ranks(2, fresh=True)
def test_a_rank_holds_its_shard_and_two_units_at_most(rank, kind, dtype, tmp_path):
    with contextlib.suppress(AttributeError, OSError):  # what is freed goes back at once, and is not kept for later
        ctypes.CDLL(None).mallopt(-3, 256 << 10)  # M_MMAP_THRESHOLD
    made = config(kind)
    cls = transformers.AutoModelForCausalLM
    if rank == 0:
        model = cls.from_config(made)
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
        print(f"{kind} {dtype}: peak {found.bytes >> 10} KiB, shard {shard >> 10} KiB, largest unit {unit >> 10} KiB")
        assert len(engine.units) > 6
        assert found.bytes <= shard + 2 * unit, (found.bytes, shard, unit)
