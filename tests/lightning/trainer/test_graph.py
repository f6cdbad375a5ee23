"""A logger that traces the model on rank 0, as TensorBoardLogger(log_graph=True) does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import lightning_shard.trainer.strategy
from lightning_shard.for_lightning import ShardStrategy
from tests.lightning.support import assert_same_state, loader, net_class, trainer
from tests.support.logs import captured_log
from tests.support.ranks import ranks


class Traces(Logger):
    """As Lightning's, but that it keeps the graph."""

    name, version, _log_graph = "traces", 0, True

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        pass

    def log_hyperparams(self, *args: Any) -> None:
        pass

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        traced = torch.jit.trace(model, model.example_input_array, strict=False)
        nodes = [str(node.kind()) for node in traced.inlined_graph.nodes()]
        self.graphs.append([kind for kind in nodes if kind.startswith("aten")])


class Example(net_class("lightning")):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, 6)


@pytest.mark.exhaustive
@ranks(2)
def test_the_graph_that_is_logged_is_that_of_ddp_and_the_run_goes_on(rank, world_size):
    found = []
    for strategy in ("ddp", "shard", ShardStrategy(unshard_at_end=False)):
        module, logger = Example(), Traces()
        t = trainer("lightning", world_size, strategy, logger=logger)
        t.validate(module, loader(world_size), verbose=False)
        t.fit(module, loader(world_size))
        found.append((logger.graphs, module, t.callback_metrics["train"]))
        assert "log_graph" not in vars(logger)
    (graphs, expected, loss), (own, module, value), (others, _, third) = found
    assert [graph.count("aten::linear") for graph in graphs] == ([5, 5] if rank == 0 else [])
    assert own == graphs and others == graphs
    assert_same_state(module.state_dict(), expected.state_dict())
    torch.testing.assert_close(torch.stack([value, third]), torch.stack([loss, loss]))


@ranks(2)
def test_no_graph_is_logged_where_whole_parameters_do_not_fit(rank, world_size, monkeypatch):
    monkeypatch.setattr(lightning_shard.trainer.strategy, "fits_on_every_rank", lambda *_: False)
    module, logger = Example(), Traces()
    with captured_log() as log:
        trainer("lightning", world_size, ShardStrategy(unshard_at_end=False), logger=logger).fit(
            module, loader(world_size)
        )
    assert not logger.graphs
    assert rank > 0 or any("log_graph=False" in line for line in log)
