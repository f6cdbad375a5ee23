"""``torch_shard.fsdp.fully_shard``: the module's class, its methods, and what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import torch_shard.fsdp
from tests.compat.harness import MLP, Block, batch
from tests.fsdp.programs import build, fsdp2, loss_of, same_as_plain, sgd, train
from tests.support.logs import captured_log
from tests.support.ranks import ranks
from torch_shard import ShardTensor, engine_of
from torch_shard.errors import ConfigError, ShardError, ShardPicklingError
from torch_shard.fsdp import (
    CPUOffload,
    FSDPModule,
    MixedPrecisionPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
    translate_settings,
)
from torch_shard.fsdp import FullyShardedDataParallel as FSDP

# The oldest torch that is supported has none.
DIMENSIONS = getattr(torch_shard.fsdp, "DataParallelMeshDims", types.SimpleNamespace)


wrapped = functools.partial(fsdp2, torch_shard.fsdp)


@ranks(2)
def test_modules_keep_their_identity_and_get_torchs_class(rank):
    model = build()
    optimizer = sgd(model)
    blocks = list(model.blocks)
    assert wrapped(model) is model and list(model.blocks) == blocks
    assert type(model).__name__ == "FSDPMLP" and type(blocks[0]).__mro__[1:3] == (FSDPModule, FSDPModule.__mro__[1])
    assert isinstance(model, MLP) and isinstance(blocks[0], Block) and type(model.inp) is nn.Linear
    assert isinstance(type(blocks[0])(7), Block) and not isinstance(type(blocks[0])(7), FSDPModule)
    same_as_plain(model, rank, optimizer=optimizer)
    found = model.state_dict()
    assert list(found) == list(build().state_dict()) and all(isinstance(v, ShardTensor) for v in found.values())
    with pytest.raises(ShardPicklingError, match="state_dict"):
        pickle.dumps(model)


@ranks(2)
def test_copies_train_by_themselves(rank):
    model = wrapped()
    for _ in range(2):  # before and after the first forward
        other = copy.deepcopy(model)
        assert type(other) is type(model)
        losses = train(model, sgd(model), rank, 2)
        assert train(other, sgd(other), rank, 2) == losses
    part = copy.deepcopy(wrapped().blocks[0])
    part(torch.ones(2, 7, dtype=torch.float64))
    assert engine_of(part) is not None


@ranks(2)
def test_a_copy_reduces_or_holds_back_as_its_model_does(rank):
    model = wrapped()
    model(batch(rank, 0))
    for module in (model, model.blocks[1]):
        module.set_requires_gradient_sync(False)
        other = copy.deepcopy(model)
        assert not engine_of(other).require_backward_grad_sync
        loss_of(other, batch(rank, 0)).backward()
        with pytest.raises(ShardError, match="reduce"):
            sgd(other).step()
        module.set_requires_gradient_sync(True)
    assert engine_of(copy.deepcopy(model)).require_backward_grad_sync
    mixed = FSDP(nn.Sequential(fully_shard(nn.Linear(5, 3).double())))
    mixed(batch(rank, 0))
    mixed[0].set_requires_gradient_sync(False)
    assert not engine_of(copy.deepcopy(mixed)).require_backward_grad_sync


@ranks(2)
def test_modules_may_be_wrapped_from_outside_to_inside(rank):
    net = build()
    fully_shard(net)
    fully_shard(net.blocks[1].up)  # before what is between them
    fully_shard(net.blocks[1])
    part = copy.deepcopy(net.blocks[1])
    part.up(torch.ones(2, 7, dtype=torch.float64))
    assert engine_of(part) is not None and engine_of(part.up) is None
    net.blocks[1].up.unshard()  # the first use is of a part
    net.blocks[1].up.reshard()
    assert engine_of(net) is not None and engine_of(net.blocks[1].up) is None
    assert {"blocks.1", "blocks.1.up"} <= {unit.name for unit in engine_of(net).units}
    same_as_plain(net, rank)
    with pytest.raises(ConfigError, match=r"norm\.weight is a parameter of a model that is sharded already"):
        fully_shard(net.blocks[2])


def test_a_part_of_several_wrapped_modules_is_refused():
    layer = nn.Linear(4, 4)
    first, second = fully_shard(nn.Sequential(layer)), fully_shard(nn.Sequential(layer, nn.Tanh()))
    with pytest.raises(ConfigError, match="a part of 2 modules that were wrapped one by one"):
        fully_shard(layer)
    assert type(layer) is nn.Linear and first[0] is second[0]


@ranks(2)
def test_reshard_after_forward_becomes_a_strategy(rank):
    for given, strategy in ((None, "full_shard"), (True, "full_shard"), (False, "shard_grad_op")):
        model = wrapped(reshard_after_forward=given)
        model(batch(rank, 0))
        assert engine_of(model).config.strategy == strategy
    translate_settings.warn_once.cache_clear()
    model = wrapped()
    model.blocks[2].set_reshard_after_forward(False)
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    with captured_log() as messages:
        model(batch(rank, 0))
        model.set_modules_to_forward_prefetch([model.blocks[0]])
    config = engine_of(model).config
    assert config.strategy == "full_shard" and config.prefetch == 2
    if rank == 0:
        assert "reshard_after_forward=False of blocks.2" in messages[0] and "set_modules_to_forward" in messages[-1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"offload_policy": CPUOffload(offload_params=True)}, "offload_policy must be of type OffloadPolicy"),
        ({"reshard_after_forward": "yes"}, "reshard_after_forward must be"),
        ({"mp_policy": torch.bfloat16}, "mp_policy must be"),
        ({"ignored_params": [nn.Linear(2, 2)]}, "ignored_params must hold Parameter"),
        ({"dp_mesh_dims": DIMENSIONS(shard="dp")}, "dp_mesh_dims is for"),
        ({"mesh": 3}, "mesh must be"),
        (
            {"shard_placement_fn": lambda p: type("Result", (), {"mesh_info": 1})()},
            "gives inp.weight a mesh of its own",
        ),
    ],
)
def test_an_argument_that_cannot_be_kept_is_refused_before_anything_changes(arguments, said):
    model = build()
    with pytest.raises(ConfigError, match=said):
        fully_shard(model, **arguments)
    assert type(model) is MLP and not model._forward_pre_hooks


def test_modules_that_cannot_be_wrapped_are_refused():
    with pytest.raises(ConfigError, match="ModuleList has no forward"):
        fully_shard(build().blocks)
    for wrong in (3, [3]):
        with pytest.raises(ConfigError, match="module must be"):
            fully_shard(wrong)
    with pytest.raises(ConfigError, match="wrapped already"):
        fully_shard(fully_shard(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match="wrapped already"):
        FSDP(fully_shard(nn.Linear(2, 2)))


@ranks(2)
def test_hints_are_named_and_what_would_change_numbers_is_refused(rank):
    model = wrapped()
    translate_settings.warn_once.cache_clear()
    with captured_log() as messages:
        for _ in range(2):
            model.set_is_last_backward(False)
            model.set_reshard_after_backward(False)
            model.set_unshard_in_backward(False)
            model.set_separate_reduce_scatter_group(False)
            model.set_reduce_scatter_max_input_buffers(4)
            model.set_allocate_memory_from_process_group_for_comm(True)
            model.set_symm_mem_for_comm()
        for quiet in (model.set_is_last_backward, model.set_reshard_after_backward, model.set_unshard_in_backward):
            quiet(True)
        model.set_requires_all_reduce(False)
        model.set_reduce_scatter_unused_params(True)
        model.set_force_sum_reduction_for_comms(True)
        model.reset_iter_state()
        fully_shard([nn.Linear(2, 2), nn.Linear(2, 2)], shard_placement_fn=lambda p: Shard(0))
    named = (
        "set_is_last_backward",
        "set_reshard_after_backward",
        "set_unshard_in_backward",
        "set_separate_reduce_scatter_group",
        "set_reduce_scatter_max_input_buffers",
        "set_allocate_memory",
        "set_symm_mem",
        "shard_placement_fn",
    )
    if rank == 0:  # the logger is silent on the others
        assert len(messages) == len(named) and all(name in text for name, text in zip(named, messages, strict=True))
        assert "a list of modules" in messages[-1]
    for call in (
        lambda: model.set_custom_all_gather(None),
        lambda: model.set_custom_reduce_scatter(None),
        lambda: model.set_all_reduce_hook(None),
        lambda: model.set_gradient_divide_factor(0),
        lambda: model.set_gradient_divide_factor("2"),
        lambda: register_fsdp_forward_method(model, "nothing"),
    ):
        with pytest.raises(ConfigError):
            call()
    share_comm_ctx([model])
    same_as_plain(model, rank)


@ranks(2)
def test_a_step_with_gradients_that_a_part_of_the_model_held_back_is_refused(rank):
    model = wrapped()
    optimizer = sgd(model)
    model.blocks[1].set_requires_gradient_sync(False)
    loss_of(model, batch(rank, 0)).backward()
    with pytest.raises(ShardError, match="not reduced"):
        optimizer.step()
    with pytest.raises(ShardError, match="set_gradient_divide_factor while gradients wait"):
        model.set_gradient_divide_factor(3.0)
    model.set_requires_gradient_sync(True)
    optimizer.zero_grad()
    same_as_plain(model, rank)


@ranks(1, 2)
def test_the_divide_factor_of_a_module_is_its_own_and_a_copy_keeps_it(rank, world_size):
    model, reference = wrapped(), wrapped()
    model.blocks[1].set_gradient_divide_factor(0.5)
    loss_of(reference, batch(rank, 0)).backward()
    for m in (model, copy.deepcopy(model)):
        loss_of(m, batch(rank, 0)).backward()
        for (name, p), q in zip(m.named_parameters(), reference.parameters(), strict=True):
            scale = world_size / 0.5 if name.startswith("blocks.1.") else 1.0
            torch.testing.assert_close(p.grad.full_tensor(), q.grad.full_tensor() * scale, rtol=1e-12, atol=1e-14)
    twin = copy.deepcopy(model)  # which is sharded already
    loss_of(twin, batch(rank, 0)).backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad.full_tensor(), rtol=1e-12, atol=1e-14)


@ranks(2)
def test_unshard_shows_a_modules_own_parameters_until_reshard_or_the_next_forward(rank):
    model = wrapped()
    expected = build()
    assert model.unshard() is None
    assert type(model.inp.weight) is nn.Parameter and isinstance(model.blocks[0].up.weight, ShardTensor)
    torch.testing.assert_close(model.inp.weight, expected.inp.weight)
    model.reshard()
    assert isinstance(model.inp.weight, ShardTensor)
    handle = model.blocks[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle) and isinstance(model.blocks[0].up.weight, ShardTensor)
    handle.wait()
    assert type(model.blocks[0].up.weight) is nn.Parameter
    loss = loss_of(model, batch(rank, 0))
    assert isinstance(model.blocks[0].up.weight, ShardTensor)
    loss.backward()
    for p in model.parameters():
        p.grad = None
    same_as_plain(model, rank)


class Method(nn.Module):
    """Its forward is never called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64))

    def encode(self, x):
        return nn.functional.linear(x, self.weight)


@ranks(2)
def test_a_registered_method_shards_the_model(rank):
    model = fully_shard(Method())
    register_fsdp_forward_method(model, "encode")
    register_fsdp_forward_method(nn.Linear(2, 2), "nothing")
    other = copy.deepcopy(model)
    for m in (model, other):
        m.encode(batch(rank, 0)).pow(2).mean().backward()
        assert engine_of(m) is not None and isinstance(m.weight, ShardTensor)
        grads: list[torch.Tensor] = [torch.empty(3, 5, dtype=torch.float64) for _ in range(2)]
        reference = Method()
        reference.encode(batch(rank, 0)).pow(2).mean().backward()
        dist.all_gather(grads, reference.weight.grad)
        torch.testing.assert_close(m.weight.grad.full_tensor(), (grads[0] + grads[1]) / 2)


class Notes(Method):
    """Notes the dtypes of the inputs and of the result, before they are cast."""

    def encode(self, x, *, scale):
        result = super().encode(x) * scale
        self.seen = (x.dtype, scale.dtype, result.dtype)
        return {"encoded": result}


@ranks(2)
def test_a_registered_method_computes_as_the_policy_of_its_module_says(rank):
    low = torch.bfloat16
    x, scale = batch(rank, 0).float(), torch.tensor([2.0, 0.5, 1.0])
    for policy, seen, dtype in (
        (MixedPrecisionPolicy(low, torch.float32), low, low),
        (MixedPrecisionPolicy(low, torch.float32, output_dtype=torch.float32), low, torch.float32),
        (MixedPrecisionPolicy(output_dtype=low), torch.float32, low),
    ):
        model = fully_shard(Notes().float(), mp_policy=policy)
        register_fsdp_forward_method(model, "encode")
        expected = Notes().float().encode(x, scale=scale)["encoded"]
        for _ in range(2):  # the first call shards
            found = model.encode(x, scale=scale)["encoded"]
            assert model.seen == (seen, seen, seen) and found.dtype is dtype
            torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.1)


@ranks(2)
def test_a_mesh_of_one_dimension_is_the_models(rank):
    mesh = init_device_mesh("cpu", (2,))
    same_as_plain(wrapped(mesh=mesh), rank)
    model = build()
    fully_shard(model.blocks[0], mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))["a"])
    fully_shard(model, mesh=mesh)
    with pytest.raises(ConfigError, match=r"blocks\.0 is wrapped for other ranks"):
        model(batch(rank, 0))


@ranks(2)
def test_outputs_of_inner_modules_are_cast_as_their_policy_says(rank):
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = build().float()
    seen = {}

    def note(name):
        return lambda module, args, out: seen.update({name: (module.weight.dtype, out.dtype)})

    model.blocks[0].down.register_forward_hook(note("inside"))
    for block in model.blocks:
        fully_shard(block, mp_policy=low)
    fully_shard(model.head)  # without a policy: as it is stored
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.head.register_forward_hook(note("head"))
    outputs = []
    model(batch(rank, 0).float())
    model.blocks[0].register_forward_hook(lambda module, args, out: outputs.append(out.dtype))
    model(batch(rank, 0).float())
    assert seen["inside"] == (torch.bfloat16, torch.bfloat16) and outputs == [torch.float32]
    assert seen["head"][0] is torch.float32 and engine_of(model).config.precision.keep == ("head",)

    other = build().float()
    fully_shard(other.head, mp_policy=low)
    fully_shard(other)
    with pytest.raises(ConfigError, match=r"mixed precision of head \(Precision\(param_dtype=torch.bfloat16"):
        other(batch(rank, 0).float())


@ranks(2)
def test_both_interfaces_may_be_mixed(rank):
    model = build()
    for block in model.blocks:
        fully_shard(block)
    outer = FSDP(model)
    same_as_plain(outer, rank)
    assert len(engine_of(outer).units) == 5
