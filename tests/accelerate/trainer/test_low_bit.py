"""Optimizers with state in few bits, by the names that ``optim=`` has for them: right, or refused before the first step."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer

import torch_shard
from tests.accelerate.support.trainers import Ours, assert_same_logs, trained, trainer
from tests.support.hf_models import build
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

OF_TORCHAO = ["adamw_torch_8bit", "adamw_torch_4bit"]
TORCHAO = {"learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3}


def _refused(own, *named):
    """`own.train()` is refused; the model is as it was. Collective."""
    before = {name: value.clone() for name, value in own.model.state_dict().items()}
    with pytest.raises(ConfigError) as error:
        own.train()
    for part in (*named, "optim='adamw_torch'", "Nothing was changed"):
        assert part in str(error.value)
    assert torch_shard.engine_of(own.model) is None and own.state.global_step == 0
    assert all(torch.equal(value, before[name]) for name, value in own.model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "bits", "use"), [("AdamW", 8, "torch.optim.AdamW;"), ("Lion", 32, "an optimizer of torch.optim;")]
)
@ranks(2)
def test_an_optimizer_whose_class_is_of_bitsandbytes_is_refused_with_a_remedy(name, bits, use, tmp_path):
    model = build("gpt2")[0]
    kind = type(name, (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.x"})
    optimizer = (
        type("Subclass", (kind,), {})(model.parameters(), lr=0.1) if bits == 32 else kind(model.parameters(), lr=0.1)
    )
    optimizer.args = type("Args", (), {"optim_bits": bits})()
    with trainer(Ours, tmp_path, model, options={"optimizers": (optimizer, None)}) as own:
        _refused(own, "addresses", use)


@pytest.mark.parametrize("name", [OF_TORCHAO[0], *exhaustive(OF_TORCHAO[1])])
@pytest.mark.parametrize(("writer", "reader"), [(Ours, Ours), *exhaustive((Ours, Trainer), (Trainer, Ours))])
@ranks(2)
def test_an_optimizer_of_torchao_logs_what_it_logs_unsharded_and_resumes(writer, reader, name, tmp_path):
    pytest.importorskip("torchao")
    options = {"optim": name, **TORCHAO}
    whole = trained(writer, tmp_path / "writer", **options)
    assert_same_logs(whole, trained(Trainer, tmp_path / "stock", optim=name, learning_rate=1e-2))
    with trainer(reader, tmp_path / "writer", **options) as own:
        own.train(resume_from_checkpoint=str(tmp_path / "writer" / "checkpoint-3"))
        assert_same_logs(own.steps.logs[:-1], whole[3:-1])
        kinds = {type(value).__name__ for state in own.optimizer.state.values() for value in state.values()}
        assert any("bit" in kind for kind in kinds)
