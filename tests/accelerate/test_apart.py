"""What one rank meets alone ends on that rank, or on all of them, and soon."""

from __future__ import annotations

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from accelerate_shard import ShardPlugin
from tests.accelerate.helpers import OURS, Layer, accelerator, dataset, engine_of, loader, loss_of, net, sgd
from tests.ranks import ranks
from torch_shard.errors import ConfigError, ShardPicklingError

UNEVEN = {"dataloader_config": DataLoaderConfiguration(even_batches=False)}


class Faulty(DataLoader):
    """A loader of the user's with a mistake, which ``prepare`` comes upon after the models."""

    error: Exception | None = AttributeError("no such thing")

    @property
    def batch_sampler(self):
        if self.error is not None and "_ready" in self.__dict__:
            raise self.error
        return self.__dict__["_sampler"]

    @batch_sampler.setter
    def batch_sampler(self, value):
        self.__dict__["_sampler"] = value


def faulty(error: Exception) -> DataLoader:
    found = Faulty(dataset(8), batch_size=4)
    found.error = error
    found._ready = True
    return found


class Saves(nn.Module):
    """A model with a method of a library that sharding replaces, and layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def save_pretrained(self, folder: str) -> None:
        """As transformers has it."""


def is_whole_and_prepared(model: Saves) -> bool:
    """Whether everything that belongs to a sharded model is there."""
    return "save_pretrained" in model.__dict__ and all("forward" in layer.__dict__ for layer in model.net.layers)


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@ranks(2)
def test_a_prepare_that_fails_on_one_rank_leaves_a_model_to_prepare_again(rank, error):
    plugin = ShardPlugin(activation_checkpointing=[Layer])
    with accelerator(OURS, shard_plugin=plugin, mixed_precision="bf16") as acc:
        model = Saves()
        if rank == 1:
            with pytest.raises(error, match="mistake"):
                acc.prepare(model, faulty(error("a mistake")))
            assert not acc._models
        else:
            acc.prepare(model, loader())
        model, optimizer, data = acc.prepare(model, sgd(model.parameters()), loader())
        assert is_whole_and_prepared(model) and engine_of(model) is not None
        for batch in data:
            acc.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.exhaustive
@ranks(2)
def test_training_where_a_rank_has_no_batch_at_all_is_an_error_on_every_rank(rank):
    with accelerator(OURS, **UNEVEN) as acc:
        model, data, even = acc.prepare(net(), loader(4), loader(16))
        assert len(data) == (1 if rank == 0 else 0)
        for _ in range(2):
            with (
                pytest.raises(ConfigError, match=r"join_uneven_inputs.*even_batches"),
                acc.join_uneven_inputs([model]),
            ):
                for batch in data:
                    acc.backward(loss_of(model, batch))
        with acc.join_uneven_inputs([model]):  # what is not iterated over does not count
            for batch in even:
                acc.backward(loss_of(model, batch))
        if rank == 0:
            with pytest.raises(OSError, match="mine"), acc.join_uneven_inputs([model]):
                raise OSError("mine")
        else:
            with acc.join_uneven_inputs([model]):
                pass


@pytest.mark.exhaustive
@pytest.mark.parametrize("safe", [False, True])
@ranks(2)
def test_slices_are_not_saved_on_any_rank_and_leave_no_file(rank, safe, tmp_path):
    with accelerator(OURS) as acc:
        model = net()
        model, optimizer, data = acc.prepare(model, torch.optim.Adam(model.parameters()), loader())
        acc.backward(loss_of(model, next(iter(data))))
        optimizer.step()
        plain = acc.unwrap_model(model)
        objects = [plain.state_dict(), {"epoch": 1, "state": [optimizer.state_dict()]}, plain, plain.head]
        for number, found in enumerate(objects[: 1 if safe else None]):
            with pytest.raises(ShardPicklingError):
                acc.save(found, tmp_path / f"{number}", safe_serialization=safe)
        assert not list(tmp_path.iterdir())
        whole = acc.get_state_dict(model)
        acc.save(whole, tmp_path / "whole", safe_serialization=safe)
        acc.wait_for_everyone()
        assert [file.name for file in tmp_path.iterdir()] == ["whole"]
        acc.wait_for_everyone()
        acc.register_save_state_pre_hook(
            lambda models, weights, folder: acc.save(models[0].state_dict(), f"{folder}/hook", safe_serialization=safe)
        )
        acc.save_state(tmp_path / "state")
        assert (tmp_path / "state" / "hook").stat().st_size > 1000
