"""Kinds of modules: recurrent ones, attention, parametrizations, convolutions, batch norm."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward, same, train_alike, train_as_ddp, train_both
from tests.compat.modes import as_computed
from tests.support.marks import exhaustive, seldom
from tests.support.models import Block, Contained, Recurrent, ResNet
from tests.support.ranks import ranks
from torch_shard.schedule.unit_state import State
from torch_shard.versions import at_least


@pytest.mark.parametrize("kind", [nn.LSTM, *seldom(nn.GRU), *exhaustive(nn.RNN)])
@ranks(2)
def test_recurrent_networks(rank, world_size, kind):
    pair = train_both(lambda: Recurrent(kind), rank, world_size, unit_bytes=200)
    with torch.no_grad():
        ours, theirs = pair.each(lambda m: loss_of(m(batch(rank, 9))))
        same(ours, theirs)
    plain_copy = copy.deepcopy(pair.model)
    plain_backward(plain_copy, batch(rank, 10))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(5, 4)
        self.gru = nn.GRUCell(4, 3)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], 4)
        g = x.new_zeros(x.shape[0], 3)
        for _ in range(3):
            h, c = self.cell(x, (h, c))
            g = self.gru(h, g)
        return g


@ranks(2)
def test_cells_used_several_times_in_a_forward(rank, world_size):
    train_both(Cells, rank, world_size, unit_bytes=100)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.other = nn.MultiheadAttention(8, 2, kdim=5, vdim=5, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = x.unsqueeze(0)
        h = self.inp(x)
        h = h + self.attention(h, h, h)[0]
        h = h + self.other(h, x, x, need_weights=False)[0]
        return self.layer(h)


@pytest.mark.parametrize(
    "units",
    [*seldom(None), [nn.Linear, nn.MultiheadAttention], *seldom(["*out_proj", "*attention", "*other", "layer"])],
)
@ranks(2)
def test_multihead_attention_with_its_children_in_other_units(rank, world_size, units):
    pair = train_both(Attention, rank, world_size, units=units)
    for model in (pair.model, pair.plain):
        model.eval()
    with torch.no_grad():  # the fused path of evaluation reads the children's weights
        same(*pair.each(lambda m: m(batch(rank, 8))), "evaluation")
    with torch.inference_mode():
        same(*pair.each(lambda m: m(batch(rank, 8))), "evaluation")


class Normed(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        self.a = how(self.a)
        self.b = how(self.b)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric(layer):
    if layer.in_features != layer.out_features:
        layer = nn.Linear(layer.in_features, layer.in_features)
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        return nn.Sequential(layer, nn.Linear(layer.in_features, 6 if layer.in_features == 5 else 3))
    return layer


WAYS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "own parametrization": symmetric,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("how", WAYS)
@ranks(2)
def test_parametrizations_of_weights(rank, world_size, how):
    # Power iterations change buffers in forward: as under DDP those of rank 0 are everyone's before each forward, so both
    # ranks see one batch here.
    same_batch = "spectral" in how
    train_both(
        lambda: Normed(WAYS[how]),
        rank,
        world_size,
        make_batch=lambda r, s: batch(0 if same_batch else r, s),
        unit_bytes=100,
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
@ranks(2)
def test_old_weight_norm(rank, world_size):
    # Plain torch cannot copy such a model, so it is built twice.
    def build():
        torch.manual_seed(0)
        return Normed(nn.utils.weight_norm).double()

    model, plain = build(), build()
    torch_shard.shard(model, unit_bytes=100)
    train_alike(model, plain, [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)], rank)


@ranks(2)
def test_orthogonal_parametrization(rank, world_size):
    def build():
        return nn.Sequential(nn.utils.parametrizations.orthogonal(nn.Linear(5, 5)), nn.Linear(5, 3))

    train_both(build, rank, world_size)


class BorrowsWeight(nn.Module):
    """Computes with the weight of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.mid = nn.Linear(7, 7)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        h = self.mid(torch.tanh(self.body(x)))
        y = F.linear(h, self.head.weight, self.head.bias)
        return y + F.linear(h, self.head.weight.detach()) + h.sum() * self.body.weight.mean() + h @ self.head.weight.t()


@ranks(2, exhaustive=(3,))
def test_direct_use_of_another_modules_weight(rank, world_size):
    train_both(BorrowsWeight, rank, world_size, units=[nn.Linear])


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(1, 2)
def test_direct_use_of_a_weight_outside_of_forward(rank, world_size, strategy):
    def run(model, x):
        h = model.mid(model.body(x))
        loss = loss_of(F.linear(h, model.head.weight, model.head.bias)) + loss_of(h @ model.head.weight.t())
        loss = loss + model.mid.weight.pow(2).sum() + model.head.bias[1] * 2
        # Weighed by what each rank sees for itself: the mean over ranks counts, as under DDP.
        w = model.body.weight
        loss = loss + h.sum() * w.mean() + h.mean() * w.norm() + x.sum() * w.pow(2).sum() + x.mean() * w.max()
        loss.backward()

    train_both(BorrowsWeight, rank, world_size, run=run, units=[nn.Linear], strategy=strategy)


# -- convolutions -------------------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """conv1, conv2, dropout, fc1, fc2: the MNIST example of PyTorch, smaller."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.dropout = nn.Dropout(0.0)
        self.fc1 = nn.Linear(6 * 4, 9)
        self.fc2 = nn.Linear(9, 3)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(self.dropout(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), 1)


def images(rank, step, channels=1):
    return batch(rank, step, 3, channels, 8, 8)


@pytest.mark.parametrize("unit_bytes", [500, *seldom(4000), *exhaustive(1, 1000)])
@ranks(2)
def test_a_small_conv_net_gathers_nothing_before_it_is_needed(rank, world_size, unit_bytes):
    pair = Pair(ConvNet, rank, world_size, unit_bytes=unit_bytes, prefetch=0)
    units = pair.engine.units
    for unit in units:
        layers = {name.split(".")[0] for name in unit.names}
        assert not {"conv1", "fc2"} <= layers, f"{layers} in one unit"
    order = ["conv1", "conv2", "fc1", "fc2"]
    seen = []

    def look(name):
        def hook(module, args):
            full = {n.split(".")[0] for u in units for n in u.names if u.state.name != "SHARDED"}
            seen.append((name, full))

        return hook

    handles = [getattr(pair.model, n).register_forward_pre_hook(look(n)) for n in order]
    model, x = pair.model, images(rank, 0)
    for _ in range(2):
        seen.clear()
        loss_of(model(x))
        needed = {name: {n.split(".")[0] for u in units for n in u.names if any(m.startswith(name) for m in u.names)}
                  for name in order}  # fmt: skip
        for at, (name, full) in enumerate(seen):
            early = full - set().union(*(needed[n] for n in order[: at + 1]))
            assert not early, f"{early} gathered before {name}"
    for handle in handles:
        handle.remove()
    model.zero_grad()
    for step in range(3):
        pair.step(plain_backward, images(rank, step))
    pair.check()


@ranks(2, exhaustive=(3,))
def test_conv_nets_in_channels_last_keep_their_strides(rank, world_size):
    def build():
        return nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(5, 3),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def optimizer(model):
        return torch.optim.Adam(model.parameters(), lr=0.01)

    pair = Pair(build, rank, world_size, optimizer=optimizer, unit_bytes=300)
    strides = {n: p.stride() for n, p in pair.plain.named_parameters()}
    assert strides["0.weight"] == (27, 1, 9, 3)
    assert {n: p.stride() for n, p in pair.model.named_parameters()} == strides
    seen = {}
    pair.model[2].register_forward_pre_hook(lambda m, _: seen.update(weight=m.weight.stride(), plain=type(m.weight)))
    for step in range(3):
        pair.step(plain_backward, images(rank, step, 3).to(memory_format=torch.channels_last))
    pair.check()
    assert seen["weight"] == strides["2.weight"], "strides of the gathered weight"
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            ours, theirs = pair.optimizer.state[p][key], pair.plain_optimizer.state[q][key]
            assert ours.stride() == theirs.stride() == p.stride()
            same(ours, theirs, key)
    state = pair.engine.state_dict(rank0_only=False)
    for name, stride in strides.items():
        assert state[name].stride() == stride, f"strides of {name} in the state dict"
    with pair.engine.gathered():
        assert pair.model[0].weight.stride() == strides["0.weight"]
    pair.engine.load_state_dict(pair.plain.state_dict())
    pair.check()


@ranks(2)
def test_transposed_and_expanded_strides(rank, world_size):
    def build():
        model = MLP()
        model.inp.weight = nn.Parameter(torch.randn(5, 7).t())
        return model

    pair = train_both(build, rank, world_size)
    assert pair.model.inp.weight.stride() == (1, 7)
    wrong = MLP()
    wrong.inp.weight = nn.Parameter(torch.randn(7, 1).expand(7, 5))
    with pytest.raises(torch_shard.errors.SetupError, match=r"inp\.weight"):
        torch_shard.shard(wrong)


# -- batch norm ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broadcast_buffers", [True, *seldom(False)])
@ranks(2)
def test_a_resnet_has_gradients_and_buffers_as_under_ddp(rank, world_size, broadcast_buffers):
    def run(model, no_sync, step):
        plain_backward(model, images(rank, step, 3))

    model, ddp = train_as_ddp(ResNet, run, broadcast_buffers=broadcast_buffers, unit_bytes=2000)
    model.eval(), ddp.eval()
    with torch.no_grad():
        same(model(images(rank, 9, 3)), ddp(images(rank, 9, 3)), "evaluation")


@pytest.mark.skipif(not at_least("2.13"), reason="DDP of torch 2.11 raises an error")
@ranks(2)
def test_a_loss_of_two_forwards_through_running_statistics_trains_as_under_ddp(rank, world_size):
    """Rank 0's buffers come before each forward, also when a graph has saved them."""

    def run(model, no_sync, step):
        x, y = batch(rank, 2 * step), batch(rank, 2 * step + 1)
        between = model(x)
        with torch.no_grad():
            model(y)
        (between - model(y)).square().mean().backward()

    def build():
        return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))

    train_as_ddp(build, run, unit_bytes=200)


@pytest.mark.gpu
@ranks(1)
def test_sync_batch_norm_trains(rank, device):
    if device.type == "cpu":
        pytest.skip("SyncBatchNorm computes on GPUs only")
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()).to(device)
    plain = as_computed(copy.deepcopy(model))
    torch_shard.shard(model)
    x = torch.randn(3, 3, 8, 8, device=device)
    for m in (model, plain):
        m(x).pow(2).mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            p.grad.full_tensor().to(device), q.grad, rtol=1e-3, atol=1e-5
        )  # offload has it on the host


@ranks(2)
def test_sync_batch_norm_in_evaluation(rank, world_size):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ResNet()).double().eval()
    train_both(lambda: model, rank, world_size, make_batch=lambda r, s: images(r, s, 3))


# -- containers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_bytes", [50, *seldom(100000)])
@ranks(2)
def test_containers_without_forward_and_modules_without_parameters(rank, world_size, unit_bytes):
    train_both(Contained, rank, world_size, unit_bytes=unit_bytes)


@ranks(2)
def test_a_model_without_parameters(rank, world_size):
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    engine = torch_shard.shard(model)
    assert torch.equal(model(torch.ones(2)), torch.ones(2))
    assert engine.state_dict() == {}
    engine.close()


class Lazy(nn.Module):
    """A parameter that is registered late, but before sharding."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(5, 3)

    def forward(self, x):
        return self.lin(x) + getattr(self, "late", 0.0) + (self.lora(x) if hasattr(self, "lora") else 0.0)


@ranks(2)
def test_parameters_registered_after_construction_and_before_sharding(rank, world_size):
    def build():
        model = Lazy()
        model.register_parameter("late", nn.Parameter(torch.randn(3)))
        model.lora = nn.Sequential(nn.Linear(5, 2, bias=False), nn.Linear(2, 3, bias=False))
        return model

    train_both(build, rank, world_size, unit_bytes=50)


@ranks(2)
def test_lazy_modules_are_sharded_once_they_have_parameters(rank, world_size):
    lazy = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))
    with pytest.raises(torch_shard.errors.SetupError, match=r"0\.(weight|bias)"):
        torch_shard.shard(lazy)

    def build():
        model = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3)).double()
        model(torch.ones(1, 5, dtype=torch.float64))
        return model

    train_both(build, rank, world_size, unit_bytes=100)


# -- branches -----------------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Evaluation goes through one branch, training through the other, or through both."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(5, 7)
        self.left, self.right = (nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(2))
        self.head = nn.Linear(7, 3)

    def forward(self, x, branches):
        x = self.inp(x)
        return self.head(x + sum(getattr(self, name)(x) for name in branches))


@pytest.mark.exhaustive(usual=True)
@ranks(2)
def test_what_was_remembered_of_another_branch_does_no_harm(rank, world_size):
    pair = Pair(Branches, rank, world_size, units=[nn.Linear], prefetch=2)
    units = pair.engine.units

    def run(model, x, branches):
        loss_of(model(x, branches)).backward()

    sequence = [["left"], ["right"], ["right"], ["left", "right"], ["right", "left"], ["left"], ["left", "right"]]
    for step, branches in enumerate(sequence):
        with torch.no_grad():
            same(*pair.each(lambda m, x: m(x, ["left"]), batch(rank, 50 + step)), "evaluation")
        pair.step(run, batch(rank, step), branches)
        assert all(u.state is State.SHARDED for u in units), "still gathered after a step"
    pair.check()


class InPlaces(nn.Module):
    """Its block returns nothing: it replaces an entry of the dict that it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = Block(width)

    def forward(self, state: dict[str, torch.Tensor]) -> None:
        state["x"] = self.block(state["x"])


class ReturnsNothing(MLP):
    def __init__(self, handles: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([InPlaces(7) for _ in range(3)])
        self.handles = handles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"x": self.inp(x)}
        for block in self.blocks:
            if not self.handles:
                block(state)
                continue
            try:
                raise ValueError
            except ValueError:
                block(state)
        return self.head(state["x"])


@pytest.mark.parametrize("handles", [False, True], ids=["plainly", "while_an_error_is_handled"])
@ranks(2)
def test_modules_whose_forward_returns_nothing(rank, world_size, handles):
    train_both(lambda: ReturnsNothing(handles), rank, world_size, units=[InPlaces])
