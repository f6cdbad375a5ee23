"""What Fabric offers gives with ``shard`` what it gives with ``ddp``, in both namespaces."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.fabric.support import NAMESPACES, assert_same, batch, fabric, net, whole
from tests.lightning.support import NAMESPACES as TRAINERS
from tests.support.marks import quick
from tests.support.ranks import ranks

# The other files have the first one.
both = pytest.mark.parametrize("namespace", quick(NAMESPACES, NAMESPACES[1:]))


def sgd(module: nn.Module) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def assert_like_ddp(run: Any, namespace: str, exactly: bool = False, **options: Any) -> None:
    """What `run` returns for a Fabric: plain values and tensors."""
    found, expected = (run(fabric(which, namespace=namespace, **options)) for which in ("shard", "ddp"))
    tolerance = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **tolerance)


@both
@ranks(2)
def test_training_with_accumulation_clipping_and_autocast(namespace):
    def run(f: Any) -> Any:
        model = f.setup_module(net())
        optimizer = f.setup_optimizers(sgd(model))
        found = []
        for step in range(4):
            for micro in range(2):
                x, y = batch(2 * step + micro)
                with f.no_backward_sync(model, enabled=micro == 0):
                    with f.autocast():
                        loss = (model(x) - y).square().mean()
                    f.backward(loss, retain_graph=False)
                found.append(f.all_reduce(loss.detach().clone()))
            clip = {"max_norm": 0.4} if step % 2 else {"clip_val": 0.02}
            norm = f.clip_gradients(model, optimizer, **clip)
            found += [] if norm is None else [norm.detach().clone()]
            optimizer.step()
            optimizer.zero_grad()
        return found, whole(model)

    assert_like_ddp(run, namespace)


@both
@ranks(2)
def test_a_norm_that_is_not_finite_is_an_error_unless_it_is_not_asked_for(namespace, rank):
    def run(f: Any) -> Any:
        model, optimizer = f.setup(m := net(), sgd(m))
        x, y = batch(0)
        f.backward((model(x) - y).square().mean() * (float("nan") if rank == 1 else 1.0))
        with pytest.raises(RuntimeError):
            f.clip_gradients(model, optimizer, max_norm=1.0)
        norm = f.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        return [bool(torch.isfinite(norm))]

    assert_like_ddp(run, namespace)


@both
@ranks(2)
def test_ranks_talk_to_each_other(namespace, rank):
    def run(f: Any) -> Any:
        mine = torch.tensor([rank + 1.0, 2.0], requires_grad=True)
        everyone = f.all_gather(mine, sync_grads=True)
        everyone[:, 0].pow(2).sum().backward()
        return [
            f.all_reduce({"a": mine.detach().clone()})["a"],
            f.all_reduce(mine.detach().clone(), reduce_op="sum"),
            everyone.detach(),
            mine.grad,
            f.all_gather({"b": torch.tensor(rank)})["b"],
            torch.tensor(f.broadcast({"rank": rank}, src=1)["rank"]),
            f.broadcast(torch.tensor([rank]), src=1),
        ]

    assert_like_ddp(run, namespace, exactly=True)


@both
@ranks(2)
def test_modules_and_tensors_are_made_where_and_as_they_shall_be(namespace):
    def run(f: Any) -> Any:
        torch.manual_seed(4)
        with f.init_module():
            model: Any = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
        with f.init_tensor():
            made = torch.ones(2)
        dtypes = [str(p.dtype) for p in model.parameters()] + [str(made.dtype), str(made.device)]
        model, optimizer = f.setup(model, sgd(model))
        x, y = batch(0)
        f.backward((model(x.to(made.dtype)) - y).square().mean())
        optimizer.step()
        return [torch.tensor([len(d) for d in dtypes]), whole(model), f.to_device(torch.ones(1)).device.type == "cpu"]

    for precision in ("32-true", "64-true"):
        assert_like_ddp(run, namespace, precision=precision)


@both
@ranks(2)
def test_a_lightning_modules_steps_and_marked_methods_are_forwards(namespace):
    package = TRAINERS["lightning" if namespace == NAMESPACES[0] else "pytorch_lightning"]

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, given: Any, index: int) -> torch.Tensor:
            x, y = given
            return (self.net(x) - y).square().mean()

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return self.net.encode(x).square().mean()

    def run(f: Any) -> Any:
        model, optimizer = f.setup(m := Module(), sgd(m))
        model.mark_forward_method("score")
        for step in range(3):
            f.backward(model.training_step(batch(step), step))
            with f.no_backward_sync(model, enabled=False):
                f.backward(model.score(batch(step)[0]))
            optimizer.step()
            optimizer.zero_grad()
        return whole(model)

    # score() leaves parameters unused, which DDP must be told.
    ddp = importlib.import_module(f"{namespace}.strategies").DDPStrategy(find_unused_parameters=True)
    found, expected = (run(fabric(which, namespace=namespace)) for which in ("shard", ddp))
    assert_same(found, expected)
