"""``torch_shard.fsdp.FullyShardedDataParallel``: the wrapper, when it shards, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms._comm_hooks import default_hooks

import torch_shard
from tests.compat.harness import MLP, Block, average_grads, batch
from tests.fsdp.programs import OURS, build, loss_of, package, plain, same_as_plain, sgd, train, weights
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor, engine_of
from torch_shard.errors import ConfigError, SetupError, ShardError, ShardPicklingError
from torch_shard.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch_shard.fsdp import FullyShardedDataParallel as FSDP
from torch_shard.fsdp.wrap import ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})


@ranks(2)
def test_names_attributes_and_hooks_are_the_models_own(rank):
    net = build()
    names = [name for name, _ in net.named_parameters()]
    model = FSDP(net, auto_wrap_policy=BLOCKS)
    assert isinstance(model, FSDP) and isinstance(model, MLP) and model.module is net is model._fsdp_wrapped_module
    assert not isinstance(net, FSDP) and type(net.blocks[1]) is not Block and type(net.blocks[1].module) is Block
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    assert "_fsdp_wrapped_module" not in str(model.state_dict().keys())
    assert model.blocks[0].module.up is model.blocks[0].up is model._fsdp_wrapped_module.blocks[0].up
    assert FSDP.fsdp_modules(model) == [model, *model.blocks] and FSDP.fsdp_modules(model, root_only=True) == [model]
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    assert (model.rank, model.world_size, model.process_group) == (rank, 2, dist.group.WORLD)
    assert (model.cpu_offload, model.backward_prefetch) == (CPUOffload(), BackwardPrefetch.BACKWARD_PRE)
    assert (model.sharding_strategy, model.forward_prefetch, model.limit_all_gathers) == (
        ShardingStrategy.FULL_SHARD,
        False,
        True,
    )
    seen = []
    model.blocks[0].register_forward_hook(lambda module, *_: seen.append(module))
    same_as_plain(model, rank)
    assert seen == 3 * [model.blocks[0].module]
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    with pytest.raises(ShardPicklingError, match="state_dict"):
        pickle.dumps(model)


@ranks(1)
def test_a_wrapped_sequential_is_still_one():
    model = FSDP(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))
    assert len(model) == 3 and type(model[0]) is nn.Linear and [type(m) for m in model][1] is nn.Tanh
    assert type(model[1:]) is nn.Sequential and model[1:][1] is model[2]
    assert "FullyShardedDataParallel[Sequential]" in repr(model)


@ranks(2)
@pytest.mark.parametrize("context", [torch.inference_mode, *exhaustive(torch.no_grad)])
def test_a_model_whose_first_forward_is_an_evaluation_trains_like_plain(context, rank):
    for model in (FSDP(build()), FSDP(build(), auto_wrap_policy=BLOCKS)):
        model.eval()
        with context():
            model(batch(rank, 0))
        same_as_plain(model.train(), rank)


@ranks(2)
def test_the_outermost_wrapped_module_is_sharded_by_whichever_is_used_first(rank):
    net = build()
    for i in range(3):
        net.blocks[i] = FSDP(net.blocks[i])
    model = FSDP(net)
    optimizer = sgd(model)  # before sharding
    assert engine_of(net) is None and type(net.inp.weight) is nn.Parameter
    model.blocks[1](torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    assert engine_of(model) is engine_of(net) is not None and isinstance(net.inp.weight, ShardTensor)
    assert [u.name for u in engine_of(net).units] == ["inp", "blocks.0", "blocks.1", "blocks.2", "head"]
    optimizer.zero_grad()
    same_as_plain(model, rank, optimizer=optimizer)


@ranks(2)
def test_a_module_wrapped_twice_is_wrapped(rank):
    model = FSDP(FSDP(build()))
    assert isinstance(model.module, FSDP) and type(model.module.module) is MLP
    same_as_plain(model, rank)


class Doubled(FSDP):
    """A user's own subclass."""

    def __init__(self, module, extra, **arguments):
        super().__init__(module, **arguments)
        self.extra = extra

    def forward(self, x):
        return super().forward(x) * self.extra


@ranks(2)
def test_a_subclass_keeps_its_constructor_and_its_forward(rank):
    model = Doubled(build(), 2.0, auto_wrap_policy=BLOCKS)
    assert isinstance(model, Doubled) and isinstance(model, MLP) and not isinstance(model.blocks[0], Doubled)
    torch.testing.assert_close(model(batch(rank, 0)), 2 * build()(batch(rank, 0)))


@ranks(2)
def test_a_model_inside_torchs_checkpoint_wrapper_trains_like_plain(rank):
    model = FSDP(checkpoint_wrapper(build()))
    assert type(model.module) is MLP
    same_as_plain(model, rank)
    assert list(model.state_dict()) == list(build().state_dict())


@ranks(2)
def test_a_closed_engine_leaves_a_plain_model(rank):
    model = FSDP(build())
    train(model, sgd(model), rank)
    engine_of(model).close()
    assert all(type(value) is torch.Tensor for value in model.state_dict().values()) and engine_of(model) is None
    with pytest.raises(ConfigError, match="plain one"):
        model.clip_grad_norm_(1.0)
    torch_shard.shard(model.module)
    model(batch(rank, 0)).sum().backward()
    assert model.clip_grad_norm_(1.0) > 0


@ranks(2)
def test_what_is_sharded_already_is_not_wrapped_again(rank):
    used = FSDP(build())
    used(batch(rank, 0))
    for inner in (used, FSDP(build(), auto_wrap_policy=BLOCKS)):
        with pytest.raises(ConfigError, match=r"0\..* is a parameter of a model that is sharded already"):
            FSDP(nn.Sequential(inner))
    with pytest.raises(ConfigError, match="wrapped already"):
        FSDP(used.module)
    with pytest.raises(ConfigError, match=r"auto_wrap_policy.*but 0 is"):
        FSDP(nn.Sequential(FSDP(build())), auto_wrap_policy=BLOCKS)


@ranks(2)
def test_gradients_that_came_past_the_wrapped_model_are_refused():
    model = FSDP(build())
    optimizer = sgd(model)
    model.head.weight.pow(2).sum().backward()
    before = model.head.weight.detach().clone()
    with pytest.raises(ShardError, match=r"before the first forward of the wrapped MLP: the gradient of head\.weight"):
        optimizer.step()
    assert torch.equal(model.head.weight, before)
    with pytest.raises(SetupError, match=r"head\.weight got a gradient"):
        model(batch(0, 0))
    optimizer.zero_grad()
    model(batch(0, 0))


class Tied(nn.Module):
    """Two layers that share a weight, or are one layer at two places."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        if layer:
            self.b = self.a
        else:
            self.b.weight = self.a.weight
        self.double()

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@ranks(2)
def test_a_parameter_shared_by_wrapped_modules_trains_like_plain(rank):
    net = Tied(layer=False)
    net.a, net.b = FSDP(net.a), FSDP(net.b)
    same_as_plain(FSDP(net), rank, reference=Tied(layer=False))


@ranks(2)
@pytest.mark.parametrize("wrapped", ["a", "b"])
def test_a_layer_at_two_places_may_be_wrapped_at_one_of_them(wrapped, rank):
    net = Tied(layer=True)
    setattr(net, wrapped, FSDP(net.a))
    model = FSDP(net)
    same_as_plain(model, rank, reference=Tied(layer=True))
    assert isinstance(net.a, FSDP) and net.a is net.b
    assert list(model.state_dict()) == list(Tied(layer=True).state_dict())


@ranks(2)
def test_several_wrapped_models_in_a_plain_module(rank):
    torch.manual_seed(1)
    reference = nn.Sequential(build(), nn.Linear(3, 4).double())
    model = nn.Sequential(*(FSDP(copy.deepcopy(part)) for part in reference))
    optimizers = [sgd(part) for part in model]
    plain_optimizer = sgd(reference)
    for step in range(2):
        loss_of(model, batch(rank, step)).backward()
        loss_of(reference, batch(rank, step)).backward()
        average_grads(reference)
        for optimizer in (*optimizers, plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    assert FSDP.fsdp_modules(model, root_only=True) == list(model)
    expected = [p.detach() for p in reference.parameters()]
    with FSDP.summon_full_params(model, writeback=False):
        torch.testing.assert_close([p.detach() for p in model.parameters()], expected, rtol=1e-9, atol=1e-10)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        found = model.state_dict()
    torch.testing.assert_close(list(found.values()), expected, rtol=1e-9, atol=1e-10)
    with pytest.raises(ConfigError, match=r"optim_state_dict: model must be the outermost wrapped module"):
        FSDP.optim_state_dict(model, optimizers[0])
    with pytest.raises(ConfigError, match="nothing in this Linear is wrapped"):
        FSDP.state_dict_type(nn.Linear(2, 2), StateDictType.FULL_STATE_DICT).__enter__()
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass


@pytest.mark.exhaustive
@ranks(2)
def test_copies_train_by_themselves(rank):
    for model in (FSDP(build()), FSDP(build(), auto_wrap_policy=BLOCKS)):
        for _ in range(2):  # before and after the first forward
            other = copy.deepcopy(model)
            assert type(other) is type(model) and other.module is not model.module
            assert other.__dict__ is other.module.__dict__ and other.blocks[0] is other.module.blocks[0]
            losses = train(model, sgd(model), rank, 2)
            assert train(other, sgd(other), rank, 2) == losses
            assert engine_of(other) is not engine_of(model) and engine_of(other).model is other.module


@ranks(2)
def test_methods_for_the_whole_model_are_refused_for_a_part(rank):
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    part = model.blocks[1]
    for call in (
        lambda: part.clip_grad_norm_(1.0),
        lambda: part.no_sync().__enter__(),
        lambda: part.register_comm_hook(None, default_hooks.reduce_scatter_hook),
        lambda: FSDP.set_state_dict_type(part, StateDictType.SHARDED_STATE_DICT),
    ):
        with pytest.raises(ConfigError, match=r"blocks\.1 is"):
            call()


@ranks(2)
def test_a_communication_hook_of_torchs_reduces(rank):
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), default_hooks.reduce_scatter_hook)
    same_as_plain(model, rank)


@ranks(2)
def test_no_sync_around_backward_alone_accumulates_as_torchs_does(rank):
    """DDP decides by the forward, FSDP by the backward: here the last backward must reduce what its forward did not announce."""
    model, reference = FSDP(build()), build()
    for m in (model, reference):
        with model.no_sync() if m is model else contextlib.nullcontext():
            loss_of(m, batch(rank, 0)).backward()
            second = loss_of(m, batch(rank, 1))
        second.backward()
    average_grads(reference)
    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, reference.get_parameter(name).grad, rtol=1e-9, atol=1e-11)


@ranks(2)
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("recurse", [False, True])
def test_full_parameters_are_summoned_of_a_module_and_with_recurse_of_those_inside(recurse, rank0_only, rank):
    model = FSDP(build(), auto_wrap_policy=BLOCKS)
    expected = dict(build().named_parameters())
    loss_of(model, batch(rank, 0)).backward()
    here = not rank0_only or rank == 0
    with FSDP.summon_full_params(
        model, recurse=recurse, rank0_only=rank0_only, offload_to_cpu=True, with_grads=True, writeback=True
    ):
        assert isinstance(model.inp.weight, ShardTensor) is not here
        assert isinstance(model.blocks[0].up.weight, ShardTensor) is not (here and recurse)
        if here:
            torch.testing.assert_close(model.inp.weight, expected["inp.weight"])
            assert model.inp.weight.grad.shape == (7, 5)
            with torch.no_grad():
                model.inp.weight.fill_(2.0)
    assert (model.inp.weight.full_tensor() == 2.0).all()
    with FSDP.summon_full_params(model.module.blocks, recurse=recurse):  # a part, not wrapped itself
        assert isinstance(model.blocks[0].up.weight, ShardTensor) is not recurse
        assert isinstance(model.inp.weight, ShardTensor)


@ranks(2)
def test_apply_sees_whole_parameters():
    for model in (FSDP(build(), auto_wrap_policy=BLOCKS), FSDP(build())):
        seen = []

        def orthogonal(module, seen=seen):
            seen.append(type(module))
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)

        torch.manual_seed(3)
        assert model.apply(orthogonal) is model
        head = weights(package(OURS), model)["head.weight"]
        torch.testing.assert_close(head @ head.T, torch.eye(3, dtype=torch.float64))
        if isinstance(model.blocks[0], FSDP):
            model.blocks[0].apply(orthogonal)
            assert seen.count(nn.Linear) == 8 + 2


@ranks(2)
@pytest.mark.exhaustive
def test_compiled_models_train_like_plain(rank):
    blocks, pending = FSDP(build(), auto_wrap_policy=BLOCKS), FSDP(build())
    for module in (*blocks.blocks, pending):
        module.compile(backend="eager")
    for model in (torch.compile(FSDP(build(), auto_wrap_policy=BLOCKS), backend="eager"), blocks, pending):
        torch.testing.assert_close(train(model, sgd(model), rank), plain(rank)[0], rtol=1e-10, atol=1e-12)


@ranks(2)
def test_the_sharded_grad_scaler_skips_the_same_steps_on_all_ranks(rank):
    from torch_shard.fsdp.sharded_grad_scaler import ShardedGradScaler

    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    model = FSDP(build().float(), auto_wrap_policy=BLOCKS, mixed_precision=MixedPrecision(torch.float16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.state_dict()
    loss = model(batch(rank, 0).float()).float().sum() * (float("inf") if rank else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_engine_functions_reach_a_wrapped_model(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = FSDP(nn.Linear(2, 2), auto_wrap_policy=BLOCKS)
    assert torch_shard.engine_of(model).model is model.module
