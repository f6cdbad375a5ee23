"""Inputs of checkpointed layers wait for backward in host memory: the same numbers, and the memory is really given back."""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.marks import exhaustive
from tests.support.offload_models import ROWS, WIDTH, Layer, Net, batch, equal, gradients, net, offload_in
from torch_shard.activation_checkpointing import checkpointed_layers
from torch_shard.activation_offload import MIN_BYTES, ActivationOffload
from torch_shard.errors import ConfigError, HostMemoryError, ShardError
from torch_shard.offload import host_buffers

INPUT = ROWS * WIDTH * 4  # bytes


def trained(model: Net, steps: int = 3, mask: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Losses and gradients of each step, with dropout."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(5)
    for step in range(steps):
        loss = model(batch(step), mask)
        loss.backward()
        found += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def left_behind(model_or_offload: Any) -> bool:
    """Whether something of an offload is alive. Without the collector's help: it must not depend on when that runs."""
    offload = model_or_offload if isinstance(model_or_offload, ActivationOffload) else offload_in(model_or_offload)
    return bool(offload._copies) or offload.host_bytes_in_use > 0


@pytest.mark.parametrize("chosen", [True, (Layer,), ("Layer",)], ids=str)
@pytest.mark.parametrize("also_checkpointed", [False, True])
def test_training_gives_the_same_bits(chosen, also_checkpointed):
    model, mask = net(chosen, also_checkpointed), torch.rand(ROWS, WIDTH)
    assert equal(trained(model, mask=mask), trained(net(False), mask=mask))
    assert offload_in(model).copied_out == 3 * (4 + 1) * INPUT, "the mask once, not once for each layer"


def test_inputs_leave_the_device_between_forward_and_backward():
    """Of all but the last layer, which backward needs first."""
    kept, model = net(False, chosen=True), net()
    loss = kept(batch())
    assert kept.kept() == [True] * 4, "with checkpointing alone"
    loss.backward()
    loss = model(batch())
    assert model.kept() == [False, False, False, True]
    assert [sum(there) for there in model.there] == [1, 1, 1, 1]
    assert offload_in(model).host_bytes_in_use == 4 * INPUT
    loss.backward()
    assert model.kept() == [False] * 4 and offload_in(model).host_bytes_in_use == 0


def test_each_input_is_on_its_way_back_when_backward_comes_to_the_layer():
    model = net()
    offload, again = offload_in(model), []
    for index, layer in enumerate(model.layers):
        layer.inner.register_forward_pre_hook(lambda *_, i=index: again.append((i, offload.copied_back // INPUT)))
    model(batch()).backward()
    # The forward's calls; then each layer again, when the copies of its own and of the next one to come have begun.
    assert again == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 2), (1, 3), (0, 3)]
    assert offload.late == 0


def two_forwards(model):
    (model(batch(0)) + model(batch(1))).backward()


def backward_twice(model):
    loss = model(batch())
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_of_gradients(model):
    x = batch().requires_grad_()
    (grad,) = torch.autograd.grad(model(x), x, create_graph=True)
    grad.square().sum().backward()


@pytest.mark.parametrize("backward", [two_forwards, backward_twice, gradients_of_gradients])
def test_other_backwards_give_the_same_gradients(backward):
    model, plain = net(), net(False)
    for m in (model, plain):
        torch.manual_seed(3)
        backward(m)
    assert equal(gradients(model), gradients(plain)) and not left_behind(model)
    assert backward is not two_forwards or offload_in(model).late == 0


def test_host_memory_does_not_grow_from_step_to_step():
    model, sizes = net(), set()
    for step in range(20):
        model(batch(step)).backward()
        model.zero_grad()
        sizes.add((offload_in(model).host_bytes, offload_in(model).host_bytes_in_use))
    assert sizes == {(4 * INPUT, 0)}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_the_users_own_have_their_inputs_moved(use_reentrant):
    class Own(Net):
        offload: ActivationOffload | None = None

        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                around = contextlib.nullcontext() if self.offload is None else self.offload.inputs()
                with around:
                    x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return x.square().mean()

    torch.manual_seed(0)
    plain = Own()
    model = copy.deepcopy(plain)
    model.offload = ActivationOffload()
    assert equal(trained(model), trained(plain))
    assert model.offload.copied_out == 12 * INPUT and model.offload.copied_back == 9 * INPUT
    assert model.offload.late == 0 and not left_behind(model.offload)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_of_another_checkpoint_nothing_is_kept_and_nothing_moved(use_reentrant):
    """Hooks there would replace those of the outer checkpoint, which would then keep what it is to compute again."""
    plain, model, between = net(False), net(), []

    def both(m: Net, x: torch.Tensor) -> torch.Tensor:
        x = m.layers[0](x)
        between.append(weakref.ref(x.untyped_storage()))
        return m.layers[1](x)  # type: ignore[no-any-return]

    for m in (model, plain):
        torch.manual_seed(3)
        y = checkpoint(both, m, m.first(batch()), use_reentrant=use_reentrant)
        assert between[-1]() is None
        y.sum().backward()
    assert equal(gradients(model), gradients(plain)) and offload_in(model).copied_out == 0


def test_where_the_user_has_hooks_for_saved_tensors_in_force_these_have_the_inputs():
    model, found = net(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.data_ptr()) or t, lambda t: t):
        model(batch())
    assert len(found) >= 4 and offload_in(model).copied_out == 0


def test_without_gradients_and_in_evaluation_nothing_is_moved():
    model = net()
    with torch.no_grad():
        model(batch())
    with torch.inference_mode():
        model(batch())
    model.eval()
    model(batch()).backward()
    assert offload_in(model).copied_out == 0


@pytest.mark.parametrize("where", ["forward", "backward", "never"])
def test_a_step_that_fails_or_is_dropped_leaves_nothing_behind(where):
    model, plain = net(), net(False)

    def fail(*_: Any) -> None:
        raise KeyError("on purpose")

    if where == "never":
        model(batch(7))
    else:
        target = model.layers[2]
        handle = (
            target.register_forward_hook(fail) if where == "forward" else target.register_full_backward_pre_hook(fail)
        )
        with pytest.raises(KeyError):
            model(batch(7)).backward()
        handle.remove()
    assert not left_behind(model)
    model.zero_grad()
    assert equal(trained(model), trained(plain))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_forward_without_host_memory_for_it_raises_and_training_goes_on(use_reentrant, monkeypatch):
    def none_left(*_: Any, **__: Any) -> None:
        raise HostMemoryError("there is none")

    offload, layer, x = ActivationOffload(), Layer(), batch() * 1
    expected, again = torch.autograd.grad(layer.eval()(x).sum(), list(layer.parameters())), []
    for there in (False, True):
        with monkeypatch.context() as patch:
            if not there:
                patch.setattr(host_buffers, "allocate", none_left)
            around = (
                contextlib.nullcontext()
                if there
                else pytest.raises(HostMemoryError, match="rank 0: activation_offload")
            )
            with around, offload.inputs():
                y = checkpoint(layer, x.requires_grad_() * 1, use_reentrant=use_reentrant)
                y.sum().backward()
                again = gradients(layer)
    assert equal(again, list(expected)) and not left_behind(offload)


def test_an_input_that_is_changed_in_place_is_an_error_as_without_offload():
    class Changes(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + x.add_(1)

    for offloaded, error in ((False, RuntimeError), (True, ShardError)):
        first, model = nn.Linear(WIDTH, WIDTH), nn.Sequential(Changes(), Changes())
        with checkpointed_layers(model, (Changes,), None, offloaded):
            pass
        with pytest.raises(error, match=r"inplace|in place"):
            model(first(batch())).sum().backward()
    assert not left_behind(model)


def test_a_mask_that_is_changed_between_layers_is_copied_for_each():
    """As long as no backward comes: to the mask of the first one it would be an error, as without offload."""
    model, mask = net(layers=2), torch.rand(ROWS, WIDTH)
    x = model.layers[0](model.first(batch()), mask=mask)
    mask.add_(1)
    model.layers[1](x, mask=mask)
    assert offload_in(model).copied_out == 4 * INPUT


class Plain(torch.Tensor):
    """Some other kind of tensor."""


LEFT = {
    "small": lambda x: x[: ROWS // 2].clone(),
    "with gaps": lambda x: torch.cat((x, x), 1)[:, :WIDTH],
    "expanded": lambda x: x[:1].expand(ROWS, WIDTH),
    "parameter": lambda x: nn.Parameter(x.detach()),
    "leaf": lambda x: x.detach().requires_grad_(),
    "subclass": lambda x: x.as_subclass(Plain),
    "conjugate": lambda x: torch.complex(x, x).conj(),
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_no_plain_dense_tensor_stays_where_it_is(kind):
    offload, x = ActivationOffload(), LEFT[kind](batch())
    with offload.inputs():
        y = checkpoint(lambda x: x * torch.ones((), requires_grad=True), x, use_reentrant=False)
    y.abs().sum().backward()
    assert offload.copied_out == 0


FORMS = {
    "transposed": lambda: torch.randn(WIDTH, ROWS).t(),
    "channels last": lambda: torch.randn(2, 8, 32, 32).to(memory_format=torch.channels_last),
    "a part of another": lambda: torch.randn(3, ROWS, WIDTH)[1],
    "int64": lambda: torch.randint(9, (ROWS, WIDTH)),
    "float8": lambda: torch.randn(4 * ROWS, WIDTH).to(torch.float8_e4m3fn),
    "complex": lambda: torch.randn(ROWS, WIDTH, dtype=torch.complex64),
    "a single row": lambda: torch.randn(1, MIN_BYTES)[:, : MIN_BYTES // 2],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_tensor_comes_back_as_it_was(form):
    """Bits, dtype and strides, on which kernels depend, and it is other memory."""
    offload, seen = ActivationOffload(), []
    x = FORMS[form]()

    def layer(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        seen.append((x.detach(), x.data_ptr()))
        return scale * 2

    scale = torch.ones((), requires_grad=True)
    with offload.inputs():
        y = checkpoint(lambda x, s: layer(x, s).sin(), x, scale, use_reentrant=False)
    with offload.inputs():  # where the memory of the one before is given back
        pass
    y.backward()
    (first, where), (again, elsewhere) = seen
    assert offload.copied_out == offload.copied_back == first.nbytes and where != elsewhere
    assert again.dtype == first.dtype and again.stride() == first.stride() and again.shape == first.shape
    bits = (first.contiguous().view(torch.uint8), again.contiguous().view(torch.uint8))
    assert torch.equal(*bits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("compiled", ["the layers", *exhaustive("the model", "what is in the layers")])
def test_compiled_models_have_the_same_numbers_and_their_inputs_moved(compiled):
    torch._dynamo.reset()
    plain, model, options = net(False), net(False), {"backend": "aot_eager"}
    if compiled == "what is in the layers":
        for layer in model.layers:
            layer.forward = torch.compile(layer.forward, **options)  # type: ignore[method-assign]
    with checkpointed_layers(model, False, None, True):
        pass
    if compiled == "the layers":
        for layer in model.layers:
            layer.compile(**options)
    call: Any = torch.compile(model, **options) if compiled == "the model" else model
    for run in (call, plain):
        torch.manual_seed(3)
        run(batch()).backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert offload_in(model).copied_out == 4 * INPUT


class Group(nn.Module):
    """Two layers that are computed as one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def test_layers_whose_inputs_nobody_keeps_are_refused():
    model = nn.Sequential(Group(), Group())
    with (
        pytest.raises(ConfigError, match="activation_offload: Layer is inside of Group"),
        checkpointed_layers(model, (Group,), None, (Layer,)),
    ):
        pass
    own = Net()
    own.layers[1].gradient_checkpointing = True  # type: ignore[assignment]
    with (
        pytest.raises(ConfigError, match="gradient_checkpointing switched on"),
        checkpointed_layers(own, False, None, True),
    ):
        pass
    for chosen, said in ((("Leyer",), "activation_offload.*'Leyer'.*There is Layer"), ((nn.Conv2d,), "Conv2d")):
        with pytest.raises(ConfigError, match=said), checkpointed_layers(model, False, None, chosen):
            pass
    assert not any("forward" in module.__dict__ for m in (model, own) for module in m.modules())


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, None])
def test_a_size_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="min_bytes"):
        ActivationOffload(wrong)
