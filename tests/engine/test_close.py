"""engine.close() gives the plain model back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.odd_model import assert_grads, batch, build, reference_grads, trained
from tests.support.ranks import ranks
from torch_shard.errors import UnitStateError


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@ranks(1, 2, exhaustive=(3,))
def test_close_gives_the_plain_model_back(strategy: str, rank: int, world_size: int) -> None:
    plain, model = build(), build()
    objects = dict(model.named_parameters())
    objects["scale"].note = "mine"
    engine = torch_shard.shard(model, unit_bytes=256, strategy=strategy)
    model.head.bias.requires_grad_(False)
    plain.head.bias.requires_grad_(False)
    reference_grads(plain, world_size)
    model(batch(rank)).pow(2).mean().backward()
    engine.close()
    assert torch_shard.engine_of(model) is None
    assert model.scale.note == "mine"
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (
            p is objects[name]
            and type(p) is nn.Parameter
            and set(p.__dict__) == ({"note"} if name == "scale" else set())
        )
        assert torch.equal(p, q) and p.stride() == q.stride() and p.requires_grad == q.requires_grad
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert type(p.grad) is torch.Tensor
            torch.testing.assert_close(p.grad, q.grad, msg=name)
        assert p.untyped_storage().nbytes() == p.numel() * p.element_size()
    assert model.head.weight is model.embed.weight
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    torch.save(model.state_dict(), io.BytesIO())
    # It trains, by itself.
    model.zero_grad()
    plain.zero_grad()
    for net in (plain, model):
        net(batch(0)).pow(2).mean().backward()
    assert_grads(model, plain)


@ranks(2)
def test_hooks_are_given_back(rank: int) -> None:
    plain, model = build(), build()
    seen: list[str] = []
    for net in (plain, model):
        net.scale.register_hook(lambda g: g * 2)
        net.scale.register_post_accumulate_grad_hook(lambda p: seen.append("before"))
    engine = torch_shard.shard(model)
    handles = []
    for net in (plain, model):
        handles.append(net.head.bias.register_hook(lambda g: g * 3))
        handles.append(net.scale.register_post_accumulate_grad_hook(lambda p: seen.append("after")))
    engine.close()
    for net in (plain, model):
        net(batch(0)).pow(2).mean().backward()
    assert seen == ["before", "after"] * 2
    assert_grads(model, plain)
    for handle in handles:
        handle.remove()
    seen.clear()
    model.zero_grad()
    model(batch(0)).pow(2).mean().backward()
    assert seen == ["before"]


@ranks(2, exhaustive=(1, 3))
def test_a_model_sharded_again_after_close_keeps_its_gradients_and_the_users_hooks(rank: int, world_size: int) -> None:
    plain, model = build(), build()
    for net in (plain, model):
        net.head.bias.register_hook(lambda g: g * 3)
    kept = []  # what is still referred to of an engine must not matter to the next one
    for unit_bytes in (256, 4096, 256):  # gradients from before are kept, and added to
        engine = torch_shard.shard(model, unit_bytes=unit_bytes)
        reference_grads(plain, world_size)
        model(batch(rank)).pow(2).mean().backward()
        kept += [flat for unit in engine.units for flat in unit.flats]
        engine.close()
        assert not model.scale._backward_hooks and len(model.head.bias._backward_hooks) == 1
        assert_grads(model, plain)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@ranks(2)
def test_an_optimizer_goes_on_after_close_with_whole_state(
    kind: type[torch.optim.Optimizer], rank: int, world_size: int
) -> None:
    plain, model, engine = trained(world_size, rank)
    reference, optimizer = kind(plain.parameters(), lr=0.1), kind(model.parameters(), lr=0.1)
    for o in (reference, optimizer):
        o.step()
        o.zero_grad()
    engine.close(optimizer)
    for net, o in ((plain, reference), (model, optimizer)):
        net(batch(0)).pow(2).mean().backward()
        o.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    assert all(type(value) is torch.Tensor for value in optimizer.state[model.head.bias].values())


@ranks(2)
def test_recurrent_layers_after_close() -> None:
    model = nn.GRU(3, 4, num_layers=2)
    plain = copy.deepcopy(model)
    torch_shard.shard(model).close()
    x = torch.randn(5, 2, 3)
    model(x)[0].sum().backward()
    plain(x)[0].sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


@ranks(2)
def test_close_where_it_cannot_is_refused_and_changes_nothing(rank: int) -> None:
    model = build()
    engine = torch_shard.shard(model)
    with engine.gathered(), pytest.raises(UnitStateError, match="inside a forward or"):
        engine.close()
    assert isinstance(model.scale, torch_shard.ShardTensor)
    model(batch(rank)).sum().backward()
    engine.close()
