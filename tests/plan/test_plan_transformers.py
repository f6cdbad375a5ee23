"""The automatic plan of well known architectures."""

from __future__ import annotations

import re

import pytest
from torch import nn

pytest.importorskip("transformers")

from tests.support import hf_models
from torch_shard.config.shard_config import ShardConfig
from torch_shard.plan.planner import make_plan

HEADS = r"(lm_head|classifier|proj_out|cls|decoder|head|\w+_projection)\.(?!.*(block|layers)\.)"


@pytest.fixture(scope="module", params=hf_models.NAMES)
def model(request) -> nn.Module:
    return hf_models.build(request.param)[0]


def layers_of(model: nn.Module) -> list[str]:
    """Names of the repeated layers: numbered children of the lists called layers, block or h."""
    lists = r"(.*\.)?(layers|layer|block|blocks|h)\.\d+"
    names = [n for n, m in model.named_modules() if re.fullmatch(lists, n) and [*m.parameters()]]
    # Swin's stages hold blocks, T5's blocks hold a list of three different sublayers.
    stages = {n for n in names if any(o.startswith(f"{n}.blocks.") for o in names)}
    names = [n for n in names if n not in stages]
    return [n for n in names if not any(n.startswith(f"{o}.") for o in names)]


@pytest.mark.parametrize("unit_bytes", [1000, 32 << 20])
def test_every_layer_is_a_unit_and_head_and_embedding_share_none_unless_tied(model, unit_bytes):
    plan = make_plan(model, ShardConfig(unit_bytes=unit_bytes), 2)
    assert sorted(p.name for p in plan.params) == sorted(n for n, _ in model.named_parameters())
    if unit_bytes > 1000:
        layers = layers_of(model)
        assert len(layers) >= 3
        for name in layers:
            own = [n for n, _ in model.named_parameters() if n.startswith(f"{name}.")]
            unit = plan.unit_of(own[0])
            assert {p.name for p in unit.params} == set(own)
            assert unit.triggers == (name,)
    embeddings = {
        plan.unit_of(f"{name}.weight").name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    heads = [p for p in plan.params if re.match(HEADS, p.name) and not p.aliases]
    assert not embeddings.intersection(plan.unit_of(info.name).name for info in heads)


def test_a_tied_head_gathers_the_embedding():
    plan = make_plan(hf_models.build("gpt2")[0], ShardConfig(), 2)
    assert plan.unit_of("lm_head.weight").triggers == ("transformer.wte", "lm_head")
