"""Arguments of ``torch_shard.fsdp.FullyShardedDataParallel``: what each becomes in the engine, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.harness import MLP, Block, batch
from tests.fsdp.programs import build, loss_of, same_as_plain, sgd
from tests.support.logs import captured_log
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import ShardTensor, engine_of
from torch_shard.errors import ConfigError, SetupError
from torch_shard.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, translate_settings
from torch_shard.fsdp import FullyShardedDataParallel as FSDP
from torch_shard.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

BLOCKS = ModuleWrapPolicy({Block})


@ranks(2)
@pytest.mark.parametrize("strategy", [ShardingStrategy.SHARD_GRAD_OP, *exhaustive(ShardingStrategy.NO_SHARD)])
def test_strategies_and_prefetch_reach_the_engine(strategy, rank):
    model = FSDP(build(), sharding_strategy=strategy, backward_prefetch=None, auto_wrap_policy=BLOCKS)
    config = engine_of(model).config
    assert config.strategy == strategy.name.lower() and config.prefetch == 0
    assert not config.sync_module_states and not config.broadcast_buffers
    same_as_plain(model, rank)


@pytest.mark.parametrize(
    ("arguments", "units"),
    [
        ({}, 1),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST}, 0),
        ({"backward_prefetch": BackwardPrefetch.BACKWARD_POST, "forward_prefetch": True}, 1),
        ({"backward_prefetch": None, "forward_prefetch": True}, 1),
    ],
)
@ranks(1)
def test_units_are_gathered_ahead_in_both_directions_or_in_none(arguments, units):
    assert engine_of(FSDP(build(), auto_wrap_policy=BLOCKS, **arguments)).config.prefetch == units


@ranks(2)
def test_the_first_wrap_says_that_names_have_no_prefix(rank):
    translate_settings.warn_once.cache_clear()
    with captured_log() as messages:
        for _ in range(3):
            FSDP(build(), auto_wrap_policy=BLOCKS)
    assert len(messages) == (rank == 0) and all("_fsdp_wrapped_module.'. Code" in text for text in messages)


@ranks(2)
def test_arguments_without_a_meaning_are_named_once(rank):
    FSDP(build())  # the warning about names
    with captured_log() as messages:
        for _ in range(3):
            FSDP(build(), limit_all_gathers=False, backward_prefetch=None, forward_prefetch=True)
        FSDP(build(), use_orig_params=True, forward_prefetch=True, device_id=torch.device("cpu"))
    assert len(messages) == (rank == 0)  # the logger is silent on the others
    assert all("backward_prefetch=None" in text and "limit_all_gathers" in text for text in messages)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"cpu_offload": True}, "cpu_offload must be of type CPUOffload, not True"),
        ({"sharding_strategy": "FULL_SHARD"}, "sharding_strategy must be"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision must be"),
        ({"ignored_modules": [1]}, "ignored_modules must hold Module"),
        ({"ignored_modules": [], "ignored_states": []}, "pass one of them"),
    ],
)
def test_an_argument_that_cannot_be_kept_is_refused_before_anything_changes(arguments, said):
    net = build()
    with pytest.raises(ConfigError, match=said):
        FSDP(net, **arguments)
    assert not net._forward_pre_hooks and FSDP.fsdp_modules(net) == []
    with pytest.raises(ConfigError, match="module must be"):
        FSDP(3)


@ranks(2)
def test_sync_module_states_sends_rank_0s_values_and_without_it_each_rank_keeps_its_slice(rank):
    for sync in (True, False):
        torch.manual_seed(rank)
        net = nn.Linear(8, 8)
        own = net.weight.detach().clone()
        values: list[torch.Tensor] = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(values, own)
        weight = FSDP(net, sync_module_states=sync).state_dict()["weight"]
        if sync:
            assert torch.equal(weight, values[0])
        else:  # as with torch's class
            assert torch.equal(weight.view(-1)[0], values[0].view(-1)[0]) and not torch.equal(weight, values[0])


def with_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[1].weight.fill_(3.0)
        model[1].running_mean.fill_(2.0)
    return model


@ranks(2)
def test_ranks_that_begin_on_meta_get_rank_0s_values(rank):
    with torch.device("cpu" if rank == 0 else "meta"):
        net = with_norm()
    init = None if rank == 0 else lambda module: module.to_empty(device="cpu", recurse=False)
    model = FSDP(net, sync_module_states=True, param_init_fn=init, use_orig_params=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(with_norm().state_dict()))


@ranks(2)
def test_param_init_fn_fills_a_model_on_meta(rank):
    def init(module):
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        net = MLP().double()
    optimizer = sgd(net)
    torch.manual_seed(5)
    model = FSDP(net, auto_wrap_policy=BLOCKS, param_init_fn=init)
    found = model.state_dict()
    assert all(value.isfinite().all() and value.device.type == "cpu" for value in found.values())
    assert found["blocks.1.up.weight"].std() > 0.05
    model.load_state_dict(build().state_dict())
    same_as_plain(model, rank, optimizer=optimizer)


@ranks(2)
@pytest.mark.parametrize("way", ["to_empty", "replaced", "reset on the way"])
def test_param_init_fn_finds_what_it_fills_on_meta(way, rank):
    """As with torch's class; most functions ask for that."""

    def init(module):
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        for name, t in [(name, t) for name, t in tensors if t.is_meta]:
            if way == "replaced":
                value = torch.full(t.shape, 0.5, dtype=t.dtype)
                setattr(module, name, nn.Parameter(value) if isinstance(t, nn.Parameter) else value)
                continue
            if getattr(module, name).is_meta:
                module.to_empty(device="cpu", recurse=False)
                if way == "reset on the way":
                    module.reset_parameters()
            getattr(module, name).fill_(0.5)

    with torch.device("meta"):
        net = with_norm()
    for name, value in FSDP(net, param_init_fn=init).state_dict().items():
        assert (value == (0.5 if value.is_floating_point() else 0)).all(), name


def test_param_init_fn_that_leaves_a_module_on_meta_is_named(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torch.device("meta"):
        net = nn.Linear(3, 3)
    with pytest.raises(
        SetupError, match=r"param_init_fn has left '(weight|bias)' of Linear on the meta device; it must call"
    ):
        FSDP(net, param_init_fn=lambda module: None).state_dict()


@ranks(2)
@pytest.mark.parametrize("policy", [None, BLOCKS])
def test_a_model_on_meta_may_be_loaded_before_its_first_forward(policy, rank):
    with torch.device("meta"):
        net = MLP().double()
    model = FSDP(
        net, param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False), auto_wrap_policy=policy
    )
    if policy is not None:  # it is sharded already
        assert all((value == 0).all() for value in model.state_dict().values())
    model.load_state_dict(build().state_dict())
    same_as_plain(model, rank)


@ranks(2)
def test_mixed_precision_becomes_the_engines(rank):
    mixed = MixedPrecision(torch.bfloat16, torch.float32, keep_low_precision_grads=False)
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 3)))
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), mixed_precision=mixed)
    precision = engine_of(model).config.precision
    assert (precision.param_dtype, precision.reduce_dtype, precision.cast_inputs) == (
        torch.bfloat16,
        torch.float32,
        "root",
    )
    assert precision.keep == (nn.modules.batchnorm._BatchNorm,)
    out = model(batch(rank, 0).float())
    out.float().sum().backward()
    assert out.dtype is torch.bfloat16 and model[1].weight.dtype is model[0].weight.grad.dtype is torch.float32
    every = MixedPrecision(torch.bfloat16, cast_forward_inputs=True)
    assert engine_of(FSDP(build(), auto_wrap_policy=BLOCKS, mixed_precision=every)).config.precision.cast_inputs is True

    kept = build().float()
    kept.head = FSDP(kept.head)
    assert engine_of_used(FSDP(kept, mixed_precision=mixed), rank).config.precision.keep == ("head",)
    other = build().float()
    other.head = FSDP(other.head, mixed_precision=MixedPrecision(torch.float16))
    with pytest.raises(ConfigError, match=r"mixed precision of head \(Precision\(param_dtype=torch.float16"):
        FSDP(other, mixed_precision=mixed)(batch(rank, 0).float())


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, *exhaustive(None)])
def test_modules_that_torch_keeps_in_full_precision_keep_their_buffers(dtype, rank):
    mixed = MixedPrecision(dtype, torch.bfloat16, torch.bfloat16)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Sequential(nn.Linear(5, 3)))
    net.register_buffer("scale", torch.ones(3))
    model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), mixed_precision=mixed)
    model(batch(rank, 0).float()).float().sum().backward()
    assert model[1].running_mean.dtype is model[1].weight.grad.dtype is torch.float32
    assert model[1].running_mean.count_nonzero() and model.scale.dtype is torch.bfloat16


def test_full_precision_in_evaluation_is_refused(monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    for mixed in (MixedPrecision(torch.bfloat16), MixedPrecision(buffer_dtype=torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"FSDP_USE_FULL_PREC_IN_EVAL=1 .* Unset it; evaluate inside .*summon"):
            FSDP(build(), mixed_precision=mixed)
    FSDP(build(), mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))


def engine_of_used(model, rank):
    model(batch(rank, 0).float())
    return engine_of(model)


@ranks(2)
def test_a_policy_may_give_modules_arguments_of_their_own(rank):
    mixed = MixedPrecision(torch.bfloat16)
    policy = CustomPolicy(lambda m: {"mixed_precision": None} if isinstance(m, nn.LayerNorm) else isinstance(m, Block))
    engine = engine_of(FSDP(build().float(), auto_wrap_policy=policy, mixed_precision=mixed))
    assert engine.config.precision.keep == (
        nn.modules.batchnorm._BatchNorm,
        *(f"blocks.{i}.norm" for i in range(3)),
    )
    assert [u.name for u in engine.units] == [
        "inp",
        *(n for i in range(3) for n in (f"blocks.{i}", f"blocks.{i}.norm")),
        "head",
    ]


@ranks(2)
def test_ignored_modules_stay_plain_on_every_rank(rank):
    net = build()
    model = FSDP(net, auto_wrap_policy=BLOCKS, ignored_modules=[net.head])
    assert type(model.head.weight) is nn.Parameter
    loss_of(model, batch(rank, 0)).backward()
    others: list[torch.Tensor] = [torch.empty_like(model.head.weight) for _ in range(2)]
    dist.all_gather(others, model.head.weight.grad)
    assert not torch.equal(*others)
    nested = build()
    nested.blocks[0] = FSDP(nested.blocks[0], ignored_states=[nested.blocks[0].up.bias])
    outer = FSDP(nested)
    outer(batch(rank, 0))
    assert type(outer.blocks[0].up.bias) is nn.Parameter and isinstance(outer.blocks[0].up.weight, ShardTensor)


@ranks(2)
def test_wrapped_modules_for_other_ranks_than_the_model_are_refused(rank):
    groups = [dist.new_group([r]) for r in range(2)]
    net = build()
    net.blocks[0] = FSDP(net.blocks[0], process_group=groups[rank])
    with pytest.raises(ConfigError, match=r"blocks\.0 is wrapped for other ranks"):
        FSDP(net)(batch(rank, 0))
