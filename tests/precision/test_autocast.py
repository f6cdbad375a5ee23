"""Under autocast, parameters are gathered in low precision exactly where autocast casts them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import torch_shard
from tests.support.logs import captured_log
from tests.support.ranks import ranks
from torch_shard import Precision, ShardConfig
from torch_shard.config.autocast_params import is_cast, is_cast_by_size
from torch_shard.errors import ConfigError
from torch_shard.frontend import for_autocast

BF16 = torch.bfloat16


class Net(nn.Module):
    """Parameters of a module's own, an embedding that is tied to the head, norms and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.positions = nn.Parameter(torch.randn(1, 6, 16))
        self.gates = nn.ParameterList(torch.tensor(0.3 + i) for i in range(2))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.positions
        for gate, block in zip(self.gates, self.blocks, strict=True):
            x = x + gate.tanh() * block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


def train(model: nn.Module, parameters: Any, rank: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    losses = []
    for step in range(5):
        ids = torch.arange(24).view(4, 6).mul(step + rank + 1) % 11
        with torch.autocast("cpu", BF16):
            loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@ranks(2)
def test_it_trains_with_the_numbers_of_ddp(rank: int, strategy: str) -> None:
    torch.manual_seed(0)
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    config = for_autocast(ShardConfig(strategy=strategy), model, BF16, "the test")
    torch_shard.shard(model, config)
    wanted, found = (
        train(DistributedDataParallel(plain), plain.parameters(), rank),
        train(model, model.parameters(), rank),
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q.detach(), rtol=1e-5, atol=1e-6, msg=name)


class _Casts(TorchDispatchMode):
    """Notes which tensors are converted to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is BF16:
            self.found.add(args[0].data_ptr())
        return func(*args, **(kwargs or {}))


def _vectors() -> torch.Tensor:
    return torch.randn(3, 2, 4)


_MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "Linear": (lambda: nn.Linear(4, 4), lambda m: m(_vectors())),
    "Conv2d": (lambda: nn.Conv2d(3, 2, 1), lambda m: m(_vectors()[None])),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(2, 2, 1), lambda m: m(_vectors())),
    "LSTM": (lambda: nn.LSTM(4, 4), lambda m: m(_vectors())),
    "GRU": (lambda: nn.GRU(4, 4, bidirectional=True), lambda m: m(_vectors())),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(4, 2), lambda m: m(*[_vectors()] * 3)),
    "Embedding": (lambda: nn.Embedding(4, 4), lambda m: m(torch.arange(4))),
    "LayerNorm": (lambda: nn.LayerNorm(4), lambda m: m(_vectors())),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(2), lambda m: m(_vectors())),
}


@pytest.mark.parametrize("name", _MODULES)
def test_it_is_known_which_layers_autocast_casts(name: str) -> None:
    make, call = _MODULES[name]
    module = make()
    # oneDNN has no LSTM in bf16 on every processor. What autocast casts does not depend on it.
    with _Casts() as casts, torch.autocast("cpu", BF16), torch.backends.mkldnn.flags(enabled=False):
        call(module)
    for own, p in module.named_parameters(recurse=False):
        assert is_cast(module, own, p) == (p.data_ptr() in casts.found), own


def test_other_modules_are_told_by_their_parameters() -> None:
    class Gated(nn.Linear):
        gate: nn.Parameter

    wide, module = torch.empty(1 << 10, 1 << 10, device="meta"), nn.Module()
    assert is_cast(module, "experts", wide)
    assert not is_cast(module, "state", torch.empty(1 << 17, 16, device="meta"))  # the rates of a state-space model
    assert not is_cast(module, "positions", torch.empty(1, 577, 1024, device="meta"))
    assert not is_cast(nn.Embedding(1, 1), "weight", wide)
    assert not is_cast(
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).parametrizations.weight, "original1", wide
    )
    assert not is_cast(Gated(2, 2), "gate", wide)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "ViT"])
def test_nothing_is_told_by_its_size_in_usual_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, f"{family}Config")())
    large = 0
    for module in model.modules():
        for p in module.parameters(recurse=False):
            large += p.numel() >= 1 << 20
            assert not is_cast_by_size(module, p.shape)
    assert large > 20


class _Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1 << 12, 1 << 8))
        self.head = nn.Linear(1 << 8, 1 << 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.positions[: len(x)])


@ranks(2)
def test_the_log_names_what_is_cast_because_of_its_size_until_it_is_kept(rank: int) -> None:
    told = []
    for keep in ((), ("part",)):
        model = nn.ModuleDict({"part": _Added()})
        precision = Precision(BF16, cast_inputs=False, cast_params="autocast", keep=keep)
        with captured_log(logging.INFO) as lines:
            torch_shard.shard(model, precision=precision)
        told.append([line for line in lines if "because of the size alone" in line])
    (line,) = told[0]
    assert "torch.bfloat16" in line and ": part.positions. " in line and "Precision.keep" in line
    assert told[1] == []


def test_it_is_for_inputs_that_autocast_casts() -> None:
    with pytest.raises(ConfigError, match=r"precision\.cast_params='autocast' needs cast_inputs=False"):
        torch_shard.Precision(BF16, cast_params="autocast")
    with pytest.raises(ConfigError, match=r"precision\.cast_params must be 'all' or 'autocast'"):
        torch_shard.Precision(BF16, cast_params="norms")
