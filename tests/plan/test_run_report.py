"""``engine.report``: a page about a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError
from torch_shard.plan.run_report import Moment

pytest.importorskip("matplotlib")


def trained() -> tuple[nn.Module, torch_shard.Engine, torch.optim.Optimizer]:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)], nn.Linear(64, 1))
    engine = torch_shard.shard(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    return model, engine, optimizer


@ranks(2)
def test_the_page_has_what_is_held_planned_sent_and_waited_for(rank: int, tmp_path: Path) -> None:
    model, engine, optimizer = trained()
    path = tmp_path / f"{rank}.html"
    history = [Moment(step, 0.01, 0.001, 0.002, 0.0, 0.0, 1 << 20, 1 << 19) for step in (1, 2)]
    engine.report(path, optimizer, history)
    text = path.read_text()
    assert f"<h1>Sequential, rank {rank} of 2</h1>" in text
    assert len(re.findall("<svg", text)) == 4
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text).replace("http://www.w3.org", "")
    held, planned = engine.memory_summary(optimizer), engine.plan.predicted
    for name, now, then in (
        ("parameters", held["parameters"], planned.parameters),
        ("optimizer state", held["optimizer"], planned.optimizer),
    ):
        assert f"<td>{name}</td><td>{now / 2**20:,.2f}</td><td>{then / 2**20:,.2f}</td>" in text
    nbytes = sum(unit.nbytes for unit in engine.plan.units)
    holds = f"{planned.parameters / 2**20:,.2f} of {nbytes / 2**20:,.2f} MiB"
    assert f"<p>full_shard over 2 ranks, each of which holds {holds} between steps.</p>" in text
    assert f"<td>sent</td><td>{engine.bytes_sent / 2**20:,.2f} MiB</td>" in text
    assert "<td>2</td><td>10.0</td><td>1.0</td><td>2.0</td>" in text
    del model


def test_without_a_history_there_are_no_plots_of_it(tmp_path: Path) -> None:
    model, engine, _ = trained()
    engine.report(tmp_path / "run.html")
    assert len(re.findall("<svg", (tmp_path / "run.html").read_text())) == 2
    del model


def test_a_bad_path_is_refused(tmp_path: Path) -> None:
    model, engine, _ = trained()
    for path, message in (
        (tmp_path / "run.txt", r"must end in \.html"),
        (tmp_path / "none" / "run.html", "can't be written"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.report(path)
    del model
