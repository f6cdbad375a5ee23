"""One optimizer over modules that ``fabric.setup`` has taken one by one steps, clips and is saved as under ``ddp``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.lightning.fabric.support import assert_same, batch, fabric, net, strategy, whole
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import engine_of
from torch_shard.errors import ConfigError, StateDictError


def adam(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def start(which: Any = "shard", seed: int = 1, make: Any = sgd, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Two modules and an optimizer over both, set up apart; an optimizer of the second one's own."""
    f = fabric(which, **options)
    a, b = f.setup_module(net(seed)), f.setup_module(net(seed + 1))
    alone = [b.scale]
    both = [p for p in itertools.chain(a.parameters(), b.parameters()) if p is not b.scale]
    optimizer, own = f.setup_optimizers(make(both), torch.optim.SGD(alone, lr=0.2, momentum=0.5))
    return f, {"a": a, "b": b, "optimizer": optimizer, "own": own}


def train(
    f: Any, state: dict[str, Any], steps: range, clip: dict[str, Any] | None = None, accumulate: int = 1
) -> list[torch.Tensor]:
    """Losses and norms; in the third of each three steps the second module has no gradients."""
    a, b, optimizer, own = (state[key] for key in ("a", "b", "optimizer", "own"))
    found = []
    for step in steps:
        for micro in range(accumulate):
            x, y = batch(step * accumulate + micro)
            more = micro + 1 < accumulate
            with f.no_backward_sync(a, enabled=more), f.no_backward_sync(b, enabled=more):
                out = a(x) if step % 3 == 2 else a(x) + b(x)
                loss = (out - y).square().mean() / accumulate
                f.backward(loss)
            found.append(f.all_reduce(loss.detach().clone()))
        if clip is not None:
            norm = f.clip_gradients(a, optimizer, **clip)
            found += [] if norm is None else [norm.detach().clone()]
        optimizer.step()
        own.step()
        optimizer.zero_grad()
        own.zero_grad()
    return found


def weights(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {f"{key}.{name}": value for key in ("a", "b") for name, value in whole(state[key]).items()}


HOW = {
    "norm": {"accumulate": 3, "clip": {"max_norm": 0.2}},
    "norm inf": {"clip": {"max_norm": 0.05, "norm_type": float("inf")}},
    "value": {"clip": {"clip_val": 0.01}},
}


@pytest.mark.parametrize("how", quick(HOW, ["norm"]))
@ranks(2)
def test_it_trains_like_ddp(how):
    results = []
    for which in ("shard", "ddp"):
        f, state = start(which)
        results.append((train(f, state, range(5), **HOW[how]), weights(state)))
    (losses, found), (expected_losses, expected) = results
    torch.testing.assert_close(losses, expected_losses, rtol=1e-5, atol=1e-7)
    assert_same(found, expected)


@ranks(2)
def test_a_norm_over_both_that_is_not_finite_is_an_error_on_all_ranks_before_anything_has_changed(rank):
    f, state = start()
    x, y = batch(0)
    factor = float("inf") if rank == 1 else 1.0
    f.backward((state["a"](x) + state["b"](x) * factor - y).square().mean())
    before = state["a"].head.weight.grad.to_local().clone()
    with pytest.raises(RuntimeError, match="non-finite"):
        f.clip_gradients(state["a"], state["optimizer"], max_norm=0.1)
    assert torch.equal(state["a"].head.weight.grad.to_local().nan_to_num(), before.nan_to_num())
    assert not torch.isfinite(f.clip_gradients(state["a"], state["optimizer"], max_norm=0.1, error_if_nonfinite=False))


# -- checkpoints ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saving", "loading"), [("sharded", "sharded"), *exhaustive(("full", "ddp"), ("ddp", "full"))])
@ranks(2)
def test_training_goes_on_from_its_checkpoint_as_under_ddp(saving, loading, tmp_path):
    def which(form: str) -> Any:
        return form if form == "ddp" else strategy(state_dict_type=form)

    f, state = start(which(saving), make=adam)
    train(f, state, range(2))
    f.save(tmp_path / "state", {**state, "notes": {"epoch": 3}})
    f, again = start(which(loading), seed=7, make=adam)
    assert f.load(tmp_path / "state", again) == {"notes": {"epoch": 3}}
    train(f, again, range(2, 5))
    f, expected = start("ddp", make=adam)
    train(f, expected, range(5))
    assert_same(weights(again), weights(expected))


@pytest.mark.exhaustive
@ranks(2)
def test_a_folder_is_read_in_parts_and_under_the_keys_that_it_was_saved_by(tmp_path):
    f, state = start(strategy(state_dict_type="sharded"))
    train(f, state, range(2))
    saved = weights(state)
    f.save(tmp_path / "folder", {**state, "step": 2})
    # One of the modules, in either place.
    for key in ("a", "b"):
        module = f.setup_module(net(9))
        assert f.load(tmp_path / "folder", {key: module}) == {"step": 2}
        assert_same(whole(module), {n.removeprefix(f"{key}."): v for n, v in saved.items() if n.startswith(f"{key}.")})
    _, other = start(strategy(state_dict_type="sharded"), seed=5)
    with pytest.raises(ConfigError, match="pass these with it"):
        f.load(tmp_path / "folder", {"optimizer": state["optimizer"]})
    with pytest.raises(StateDictError, match="'c', 'd'"):
        f.load(tmp_path / "folder", {"c": state["a"], "d": state["b"]})
    # As the engine reads it.
    engines = [engine_of(module.module) for module in (other["a"], other["b"])]
    engines[0].load(tmp_path / "folder", models={"b": engines[1]})
    assert_same(weights(other), saved, rtol=0, atol=0)


@ranks(2)
def test_a_folder_without_one_of_the_modules_of_an_optimizer_is_refused(tmp_path):
    f, state = start(strategy(state_dict_type="sharded"))
    with pytest.raises(ConfigError, match="the state has not all of them"):
        f.save(tmp_path / "folder", {"a": state["a"], "optimizer": state["optimizer"]})
    assert not (tmp_path / "folder").exists()
