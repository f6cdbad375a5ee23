"""What is done to a model around sharding: initialised, copied, converted, loaded, changed."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, same_grads, same_params
from tests.support.marks import exhaustive, seldom
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError, ReplacedParameterError, SetupError, ShardError


@ranks(2)
def test_a_head_replaced_after_sharding_is_an_error_that_names_it(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    old = pair.model.head
    pair.model.head = nn.Linear(7, 2).double()
    with pytest.raises(ReplacedParameterError, match=r"head\.(weight|bias)"):
        plain_backward(pair.model, batch(rank, 1))
    pair.model.head = old
    pair.step(plain_backward, batch(rank, 1))
    pair.model.head.weight = nn.Parameter(torch.zeros(3, 7, dtype=torch.float64))
    with pytest.raises(ReplacedParameterError, match=r"head\.weight"):
        plain_backward(pair.model, batch(rank, 1))


@ranks(2)
def test_a_head_replaced_after_close_is_sharded_again(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    pair.engine.close()
    head = nn.Linear(7, 2).double()
    pair.model.head, pair.plain.head = head, copy.deepcopy(head)
    pair.engine = torch_shard.shard(pair.model, unit_bytes=500)
    torch.manual_seed(rank)  # rank 0's values are everyone's
    for parameter, wanted in zip(pair.model.head.parameters(), pair.plain.head.parameters(), strict=True):
        same(parameter, wanted)
    pair.optimizer, pair.plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pair.model, pair.plain))
    pair.train(1)


@ranks(2)
def test_two_parameters_that_are_views_of_one_storage_are_an_error_that_names_both(rank):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = torch.zeros(6, 4)
    model[0].weight, model[1].weight = nn.Parameter(both[:4]), nn.Parameter(both[2:])
    with pytest.raises(SetupError, match=r"0\.weight and 1\.weight"):
        torch_shard.shard(model)
    # Parts of one allocation that do not overlap are two ordinary parameters.
    both = torch.zeros(8, 4)
    model[0].weight, model[1].weight = nn.Parameter(both[:4]), nn.Parameter(both[4:])
    torch_shard.shard(model)


@ranks(2)
def test_a_parameter_with_weak_references_or_of_another_class_is_refused_by_name(rank):
    import weakref

    model = nn.Sequential(nn.Linear(4, 4))
    reference = weakref.ref(model[0].weight)
    with pytest.raises(SetupError, match=r"0\.weight has weak references"):
        torch_shard.shard(model)
    assert reference() is not None

    class Special(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].bias = Special(torch.zeros(4))
    with pytest.raises(SetupError, match=r"0\.bias is a Special"):
        torch_shard.shard(model)


@pytest.mark.parametrize("kind", [*seldom("mask"), "row", *exhaustive("column", "scalar tensor")])
@ranks(2, exhaustive=(3,))
def test_a_mask_or_a_row_vector_combined_with_a_parameter_between_steps(rank, world_size, kind):
    pair = Pair(MLP, rank, world_size)
    w = (7, 5)
    generator = torch.Generator().manual_seed(3)
    other = {
        "mask": (torch.rand(w, generator=generator) > 0.5).double(),
        "row": torch.rand(5, generator=generator, dtype=torch.float64),
        "column": torch.rand(7, 1, generator=generator, dtype=torch.float64),
        "scalar tensor": torch.tensor(0.9, dtype=torch.float64),
    }[kind]

    def prune(model):
        with torch.no_grad():
            model.inp.weight.mul_(other)
            model.inp.weight.data += 0.01 * other
            model.inp.weight.copy_(torch.where(model.inp.weight.abs() < 0.1, 0.0, model.inp.weight))
            if kind == "mask":
                model.inp.weight[other.bool()] = 0.25
                model.inp.weight.masked_fill_(~other.bool(), 0.5)

    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        pair.each(prune)
        pair.check()
    with torch.no_grad(), pytest.raises(RuntimeError):
        pair.model.inp.weight.mul_(torch.ones(6, dtype=torch.float64))  # as plain torch


@pytest.mark.parametrize("strategy", ["full_shard", *seldom("no_shard")])
@ranks(2, exhaustive=(1,))
def test_steps_written_by_hand(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    averages = [[torch.zeros_like(p) for p in m.parameters()] for m in (pair.model, pair.plain)]

    def step(model, average):
        for p, a in zip(model.parameters(), average, strict=True):
            p.data.add_(p.grad, alpha=-0.1)  # with gradients enabled, as old scripts do it
            p.data = p.data - 0.01 * p.grad
            a.mul_(0.9).add_(p.data, alpha=0.1)
            p.data.lerp_(a, 0.5)
            p.grad = None
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.001 * p.norm()

    for at in range(3):
        pair.backward(plain_backward, batch(rank, at))
        same_grads(pair.model, pair.plain)
        for model, average in zip((pair.model, pair.plain), averages, strict=True):
            step(model, average)
    pair.check()


@ranks(2, exhaustive=(3,))
def test_deepcopy_and_then_training_both_copies(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.train(0)
    twin = pair.copied(lambda m: torch.optim.SGD(m.parameters(), lr=0.2))
    for step in range(1, 4):
        pair.step(plain_backward, batch(rank, step))
        twin.step(plain_backward, batch(rank, 10 + step))
    pair.check()
    twin.check()
    twin.copied().check()


@ranks(2)
def test_names_and_shapes_of_parameters_are_unchanged(rank, world_size):
    pair = Pair(MLP, rank, world_size)

    def described(model):
        return [
            [(n, p.shape, p.stride(), p.ndim, p.dim(), p.numel(), p.size(0), len(p), p.dtype, p.requires_grad, p.is_leaf,
              isinstance(p, nn.Parameter)) for n, p in module.named_parameters()]
            for module in (model, *model.children(), *model.blocks, model.blocks[0].up)
        ]  # fmt: skip

    wanted = described(pair.plain)
    assert described(pair.model) == wanted
    kept = list(pair.model.parameters())
    pair.step(plain_backward, batch(rank, 0))
    assert described(pair.model) == wanted
    assert all(p is q for p, q in zip(pair.model.parameters(), kept, strict=True))
    assert list(pair.model.state_dict()) == list(pair.plain.state_dict())
    assert [n for n, _ in pair.model.named_modules()] == [n for n, _ in pair.plain.named_modules()]
    assert repr(pair.model) == repr(pair.plain)


# -- initialisation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_bytes", [500, *exhaustive(1, 1 << 20)])
@ranks(2)
def test_a_model_built_on_meta_has_the_random_values_of_a_plain_one(rank, world_size, unit_bytes):
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 5), nn.Embedding(7, 4), nn.Conv1d(3, 4, 2), nn.LSTM(4, 3), nn.Linear(5, 3))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5), nn.Embedding(7, 4), nn.Conv1d(3, 4, 2), nn.LSTM(4, 3), nn.Linear(5, 3))
    torch.manual_seed(5 + 10 * rank)  # rank 0's count
    torch_shard.shard(model, unit_bytes=unit_bytes)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(q.detach().full_tensor(), p.detach()), name


@ranks(2)
def test_initialisers_draw_the_values_of_the_plain_model(rank, world_size):
    pair = Pair(MLP, rank, world_size)

    def initialise(model):
        torch.manual_seed(11)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.trunc_normal_(module.bias, std=0.3)
        nn.init.kaiming_normal_(model.inp.weight, nonlinearity="relu")
        nn.init.constant_(model.head.bias, 0.25)
        nn.init.normal_(model.head.weight, 0.5, 2.0)
        with torch.no_grad():
            model.blocks[0].up.weight.uniform_(-1, 1)
            model.blocks[0].up.bias.bernoulli_(0.5)
        model.blocks[1].up.reset_parameters()
        model.blocks[1].norm.reset_parameters()

    pair.each(initialise)
    pair.check()
    pair.train(0)


@ranks(2)
def test_an_initialiser_of_matrices_draws_the_plain_values_or_is_refused_by_name(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    with pytest.raises(NeedsGatherError, match=r"down\.weight"):  # a wide one, which it transposes in place
        nn.init.orthogonal_(pair.model.blocks[0].down.weight)
    pair.check()
    for model in (pair.model, pair.plain):
        torch.manual_seed(1)
        nn.init.orthogonal_(model.inp.weight)
    pair.check()


# -- conversion and loading ---------------------------------------------------------------------------------------------


DTYPES = {
    "half": lambda m: m.half(),
    "to(dtype)": lambda m: m.to(torch.bfloat16),
    "float": lambda m: m.float(),
}
CONVERSIONS = {
    "to(device)": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="meta"),
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("how", CONVERSIONS)
@ranks(2)
def test_conversion_after_sharding_is_refused_by_name_and_changes_nothing(rank, world_size, how):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    with pytest.raises(ShardError, match=r"inp\.weight|norm\.weight|\.bias"):
        CONVERSIONS[how](pair.model)
    pair.check()
    pair.train(1)


@pytest.mark.parametrize("how", DTYPES)
@ranks(2)
def test_a_model_converted_after_sharding_is_not_run(rank, world_size, how):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    for model in (pair.model, pair.plain):
        DTYPES[how](model)
    x = batch(rank, 1).to(pair.plain.inp.weight.dtype)
    for context in (torch.no_grad, torch.enable_grad):
        with context(), pytest.raises(ReplacedParameterError, match=r"'inp\.weight'.*convert layers before shard"):
            pair.model(x)
    pair.check()


@ranks(2)
def test_conversions_that_change_nothing_are_allowed(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.model.to("cpu").double().to(torch.float64).cpu().train()
    pair.train(0)


@ranks(2)
def test_load_state_dict_of_the_module_takes_whole_tensors(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    torch.manual_seed(8)
    other = MLP().double()
    for model in (pair.model, pair.plain):
        assert not any(model.load_state_dict(other.state_dict()))
    pair.check()
    state = other.state_dict()
    del state["inp.weight"]
    state["new"] = torch.zeros(1)
    for model in (pair.model, pair.plain):
        with pytest.raises(RuntimeError, match=r"inp\.weight"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result.missing_keys == ["inp.weight"]
        assert result.unexpected_keys == ["new"]
    pair.check()
    own = {name: t.clone() for name, t in pair.model.state_dict().items()}
    pair.step(plain_backward, batch(rank, 1))
    pair.model.load_state_dict(own)  # shards of the same cut
    same_params(pair.model, other)


@ranks(2)
def test_load_state_dict_with_assign_is_refused_by_name(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    with pytest.raises(ShardError, match=r"inp\.weight|weight"):
        pair.model.load_state_dict(pair.plain.state_dict(), assign=True)
        plain_backward(pair.model, batch(rank, 1))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("of", [*seldom("model"), "optimizer"])
@ranks(2)
def test_zero_grad(rank, world_size, of, set_to_none):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=0.01))
    for step in range(4):
        pair.backward(plain_backward, batch(rank, step))
        same_grads(pair.model, pair.plain)
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            optimizer.step()
            (model if of == "model" else optimizer).zero_grad(set_to_none=set_to_none)
            assert all((p.grad is None) == set_to_none for p in model.parameters())
        if not set_to_none:
            same_grads(pair.model, pair.plain)
    pair.check()


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(2)
def test_a_deepcopy_between_micro_batches_has_no_gradients_as_in_plain_torch(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    copies = []
    for model in (pair.model, pair.plain):
        with pair.engine.no_sync() if model is pair.model else contextlib.nullcontext():
            plain_backward(model, batch(rank, 0))
        copies.append(copy.deepcopy(model))
        assert all(p.grad is None for p in copies[-1].parameters())
    for ours, theirs in ((pair.model, pair.plain), copies):
        for model in (ours, theirs):
            plain_backward(model, batch(rank, 1))
        average_grads(theirs)
        same_grads(ours, theirs)
