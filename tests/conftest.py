"""Fixtures and rules that all tests share."""

from __future__ import annotations

import os
import signal

# A shell starts what runs in its background with SIGINT ignored, which Python and the programs that tests start would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch is imported: the ranks of a test share few cores, and threads would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator

import pytest
import torch

from tests.support import ranks as rank_pool

torch.set_num_threads(1)

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=[pytest.param(d, marks=[pytest.mark.gpu] * (d != "cpu")) for d in DEVICES])
def device(request: pytest.FixtureRequest) -> str:
    """Each device of this machine in turn: ``"cpu"``, and ``"cuda"`` where there is one.

    In the body of a test under ``@ranks`` it is this rank's ``torch.device``.
    """
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a GPU, and torch sees none here")
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def _stop_rank_processes() -> Iterator[None]:
    yield
    rank_pool.close_all()
