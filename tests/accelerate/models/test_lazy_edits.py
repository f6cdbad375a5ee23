"""Between ``from_pretrained`` and ``prepare``: what is done to weights that have no values yet is right, or an error."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate_shard import from_pretrained
from tests.accelerate.models.test_from_pretrained import assert_equal, saved
from tests.accelerate.support.accelerators import OURS, accelerator
from tests.support.hf_models import build
from tests.support.ranks import ranks
from torch_shard.errors import SetupError, ShardPicklingError


def weight(model: Any) -> nn.Parameter:
    return model.transformer.h[0].mlp.c_fc.weight


def assigned(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight(model).data = change(weight(model).data)


LOST: dict[str, Callable[[Any], Any]] = {
    "data in place": lambda m: weight(m).data.zero_(),
    "a part of data": lambda m: weight(m).data.__setitem__(slice(5, None), 0.0),
    "data of data": lambda m: weight(m).data.data.mul_(2),
    "a view of data": lambda m: weight(m).data.view(-1)[:3].fill_(1.0),
    "all at once": lambda m: torch._foreach_mul_([p.data for p in m.parameters()], 2.0),
    "apply": lambda m: m.apply(lambda q: q.weight.data.normal_(0, 0.5) if isinstance(q, nn.LayerNorm) else None),
    "detach": lambda m: weight(m).detach().zero_(),
    "init": lambda m: nn.init.constant_(weight(m), 0.5),
    "no_grad": lambda m: torch.no_grad()(lambda: weight(m).mul_(2))(),
    "inference_mode": lambda m: torch.inference_mode()(lambda: weight(m).data.mul_(2))(),
    "converted, then edited": lambda m: (assigned(m, torch.Tensor.bfloat16), weight(m).data.zero_()),
    "edited, then converted": lambda m: (weight(m).data.zero_(), assigned(m, torch.Tensor.bfloat16)),
    "edited, then converted with the model": lambda m: (weight(m).data.zero_(), m.bfloat16()),
    "augmented": lambda m: assigned(m, lambda t: t.__imul__(2)),
    "computed": lambda m: assigned(m, lambda t: t * 2),
    "a changed clone": lambda m: assigned(m, lambda t: t.clone().mul_(2)),
    "cut and padded": lambda m: assigned(m, lambda t: nn.functional.pad(t[:, :8], (0, 120))),
    "computed in another dtype": lambda m: assigned(m, lambda t: (t.float() * 2).bfloat16()),
    "a new tensor": lambda m: assigned(m, torch.zeros_like),
    "another's": lambda m: assigned(m, lambda _: m.transformer.h[1].mlp.c_fc.weight.data),
    "of another shape": lambda m: assigned(m, lambda t: t[:, :8]),
    "a new parameter": lambda m: setattr(m.transformer.h[0].mlp.c_fc, "weight", nn.Parameter(weight(m).data * 2)),
    "load_state_dict": lambda m: m.load_state_dict({k: torch.zeros(v.shape) for k, v in m.state_dict().items()}),
    "resize_token_embeddings": lambda m: m.resize_token_embeddings(100, mean_resizing=False),
    "deepcopy": lambda m: setattr(m.transformer, "h", copy.deepcopy(m.transformer.h)),
}


@pytest.mark.parametrize(
    "edits",
    [["data in place", "computed"], pytest.param(list(LOST), marks=pytest.mark.exhaustive)],
    ids=["some", "all"],
)
@ranks(2)
def test_what_would_be_lost_is_an_error_before_anything_has_changed(edits, tmp_path):
    cls = saved("gpt2", tmp_path)
    for edit in edits:
        model = from_pretrained(cls, tmp_path)
        with accelerator(OURS) as acc:
            with pytest.raises(SetupError, match=r"read (from files )?when (it|the model) is sharded"):
                LOST[edit](model)
                acc.prepare(model)
                pytest.fail(edit)
            assert not acc._models and all(p.is_meta for p in model.parameters())


KEPT: dict[str, Callable[[Any], Any]] = {
    "data.to": lambda m: [setattr(p, "data", p.data.to(torch.bfloat16)) for p in m.parameters()],
    "to": lambda m: m.to(torch.float16),
    "half and back": lambda m: m.half().float(),
    "half and bfloat16": lambda m: m.half().bfloat16(),
    "the same dtype": lambda m: m.float(),
    "detach": lambda m: assigned(m, torch.Tensor.detach),
    "clone": lambda m: assigned(m, lambda t: t.clone().bfloat16()),
    "padded by nothing": lambda m: assigned(m, lambda t: nn.functional.pad(t, (0, 0))),
    "a parameter of data": lambda m: setattr(m.transformer.h[0].mlp.c_fc, "weight", nn.Parameter(weight(m).data)),
    "a frozen one": lambda m: setattr(
        m.transformer.h[0].mlp.c_fc, "weight", nn.Parameter(weight(m).data.half(), requires_grad=False)
    ),
    "a new one": lambda m: setattr(m.transformer.h[0].mlp.c_fc, "weight", nn.Parameter(torch.full((32, 128), 0.5))),
    "assign": lambda m: m.load_state_dict({k: torch.ones(v.shape) for k, v in m.state_dict().items()}, assign=True),
    "tie_weights": lambda m: m.tie_weights(),
    "init_weights": lambda m: m.init_weights(),
    "fewer layers": lambda m: setattr(m.transformer, "h", m.transformer.h[:1]),
    "frozen": lambda m: m.transformer.h[0].requires_grad_(False),
    "read": lambda m: [
        (p.data.shape, p.data.dtype, p.data.clone().mul_(2), p.detach().numel()) for p in m.parameters()
    ],
}


@pytest.mark.parametrize(
    "edits", [["data.to", "half and back"], pytest.param(list(KEPT), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
@ranks(2)
def test_conversions_and_what_changes_no_values_in_place_are_as_on_any_model(edits, tmp_path):
    cls = saved("gpt2", tmp_path)
    for edit in edits:
        reference = cls.from_pretrained(tmp_path)
        model = from_pretrained(cls, tmp_path)
        KEPT[edit](reference)
        KEPT[edit](model)
        with accelerator(OURS) as acc:
            print(edit)
            assert_equal(acc.prepare(model), reference)


@pytest.mark.exhaustive
@ranks(1)
def test_weights_without_values_are_not_pickled(tmp_path):
    cls = saved("gpt2", tmp_path)
    model = from_pretrained(cls, tmp_path)
    assert dist.is_initialized()
    for found in (model.state_dict(), list(model.parameters())):
        with pytest.raises(ShardPicklingError, match="no values yet"):
            torch.save(found, io.BytesIO())
    assert isinstance(weight(model), nn.Parameter)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in build("gpt2", 1)[0].named_parameters()]
