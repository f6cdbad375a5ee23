"""The report: with and without matplotlib, what it counts, and what it leaves out."""

from __future__ import annotations

import importlib.util
import json
import math
import re
from pathlib import Path

import pytest

from torch_shard.selftest.context import Setting
from torch_shard.selftest.report import Report
from torch_shard.selftest.results import Result, at_most, error_text, scrubbed, skipped, within

RESULTS = [
    within("correctness", "full_shard, fp32, SGD", 1e-6, 0.0, 1e-3, doubled=1.1),
    within("correctness", "no_shard, fp32, SGD", math.nan, 0.0, 1e-3),
    skipped("streams", "<full_shard>", "the CPU has no streams"),
    within("memory", "full_shard: parameters", 1000, 1000, 0.0, "bytes"),
    at_most("memory", "full_shard: allocated", 1001, 1000, "bytes"),
    within("speed", "a step: torch_shard", 2.0, 2.0, 0.1, "loss", step=0.012, MFU="unknown"),
]
ENVIRONMENT = {"torch": "2.13.0", "torch_shard": "0.1.0", "devices": ["NVIDIA H100", "NVIDIA H100"], "cuda": "13.0"}


def report(results=RESULTS) -> Report:
    return Report(Setting("cuda", 2), ENVIRONMENT, results, 12.0)


def check_page(page: str) -> None:
    # Names of XML dialects are no addresses that a browser loads.
    rest = re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)
    assert "http" not in rest and "<script" not in rest and "src=" not in rest and "<link" not in rest
    assert "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert "&lt;full_shard&gt;" in page and page.count("<tr") == 6 + 4 + 4  # results, heads, environment


def test_without_matplotlib_the_tables_are_there_and_it_says_how_to_get_plots(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    page = report().html()
    check_page(page)
    assert "pip install matplotlib" in page and "<svg" not in page


def test_with_matplotlib_plots_are_inside_and_take_the_colours_of_the_page():
    pytest.importorskip("matplotlib")
    page = report().html()
    check_page(page)
    assert page.count("<svg") == 3 and "currentColor" in page and "pip install" not in page
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_verdict_counts_and_gives_the_first_failure_with_its_numbers_and_what_to_do():
    lines = report().verdict
    assert lines[0] == "torch-shard-engine 0.1.0, torch 2.13.0, CUDA 13.0; 2 ranks on cuda (NVIDIA H100)"
    assert lines[-1] == "FAILED: 3 passed, 2 failed, 1 skipped, in 12 s"
    first = lines.index("first failure  correctness: no_shard, fp32, SGD")
    assert lines[first + 1] == "  measured nan, expected 0 with a tolerance of 0.001"
    assert lines[first + 2].startswith("  Don't train with this combination.")


def test_exit_codes():
    assert report().exit_code == 1
    assert report(RESULTS[:1]).exit_code == 0
    assert report(RESULTS[2:3]).exit_code == 2  # what was skipped has not passed


def test_json_has_no_numbers_that_json_lacks():
    text = json.dumps(report().plain(), allow_nan=False)
    assert json.loads(text)["results"][1]["measured"] == "nan"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("No such file: '/home/my name/x.pt'", "No such file: <path>"),
        ("error:/data/run/x.py:3 in f", "error:<path> in f"),
        ("see ~/x, ../y/z", "see <path>, ..<path>"),
        ("closed by peer [127.0.0.1]:1234", "closed by peer [<address>]:1234"),
        (
            "100 tokens/s of unit (root), see https://pytorch.org/docs",
            "100 tokens/s of unit (root), see https://pytorch.org/docs",
        ),
        ("on the-host, the-host.example.com", "on <host>, <host>"),
        ("by user-1", "by <user>"),
    ],
)
def test_texts_lose_paths_and_names(text, expected, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "the-host.example.com")
    monkeypatch.setattr("getpass.getuser", lambda: "user-1")
    assert scrubbed(text) == expected


def test_an_error_is_its_class_its_message_and_module_and_line():
    try:
        Path("/gone/for/good").read_text()
    except OSError as error:
        text = error_text(error)
    assert re.fullmatch(
        r"FileNotFoundError: \[Errno 2\] No such file or directory: <path> \(at tests.selftest.test_report:\d+ > pathlib.*\)",
        text,
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see file:///home/bob/x.py", "see file:/<path>"),
        ("g++ -I/home/bob/include x", "g++ -I<path> x"),
        ("no route to fe80:0:0:1::7", "no route to <address>"),
        ("12:30:15 tokens/s, a / b", "12:30:15 tokens/s, a / b"),
    ],
)
def test_paths_and_addresses_are_left_out_of_texts(text, shown):
    assert scrubbed(text) == shown


def test_a_result_that_is_no_number_has_not_passed():
    assert within("memory", "x", math.inf, math.inf, 1.0).status == "failed"
    assert at_most("memory", "x", math.nan, 1.0).status == "failed"
    assert Result("memory", "x", "skipped").measured is None
