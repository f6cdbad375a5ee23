"""The pages of a plan, of a run and of a profiled run, as a browser shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from tests.support.browser import needs_chromium, seen
from tests.support.ranks import run
from torch_shard import ShardConfig, shard
from torch_shard.plan import search
from torch_shard.plan.report import report
from torch_shard.plan.run_report import Moment

PLOTS = {"plan": 3, "run": 4, "profiled": 4}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(64, 128)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def write_pages(rank: int, world_size: int, folder: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    found = search(
        model, lambda m: step(m, optimizer), memory=4 << 20, ranks=world_size, on="cpu", optimizers=[optimizer]
    )
    engine = shard(model, found.best.candidate.config(ShardConfig()))
    for _ in range(3):
        step(model, optimizer)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step(model, optimizer)
    if rank == 0:
        (folder / "plan.html").write_text(report(found, "a plan", {"lightning": "Trainer()"}))
        moments = [Moment(number, 0.01, 0.001, 0.002, 0.0, 0.0, 1 << 20, 1 << 19) for number in range(20)]
        engine.report(folder / "run.html", optimizer, moments)
        profiler.export_chrome_trace(str(folder / "trace.json"))
        engine.report(folder / "profiled.html", optimizer, profile=folder / "trace.json", predicted=found)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("pages")
    run(2, write_pages, folder)
    return folder


@pytest.mark.exhaustive
@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
@pytest.mark.parametrize("name", PLOTS)
def test_a_browser_shows_the_page(pages: Path, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    found = seen(pages / f"{name}.html", tmp_path, width, dark)
    assert len(found["marks"]) == PLOTS[name] and min(found["marks"]) >= 4
    assert not found["wide"]  # plots and tables scroll, the page does not
    assert found["back"] < 0.2 if dark else found["back"] > 0.9
    for text in (found["text"], *found["labels"][:-1]):  # those of the last one, the map of units, lie on its tiles
        assert abs(text - found["back"]) > 0.6
