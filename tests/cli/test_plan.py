"""``torch-shard plan`` on small models."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.run_python import run_python
from torch_shard import Offload
from torch_shard.activation_checkpointing import offload_of as activation_offload_of
from torch_shard.cli import plan
from torch_shard.cli.main import main
from torch_shard.config.offload import offload_of
from torch_shard.config.offload_text import read_offload
from torch_shard.config.precision import for_autocast
from torch_shard.errors import ConfigError
from torch_shard.plan.devices import link
from torch_shard.plan.hardware import OUTSIDE, Hardware
from torch_shard.plan.paste import lines_for
from torch_shard.plan.search_results import Candidate

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    transformers.AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    return str(folder)


def planned(model: str, *arguments: str) -> int:
    return main(["plan", "--model", model, "--batch", "8", "--seq", "128", "--gpus", "4", *arguments])


def test_it_prints_candidates_and_what_to_paste(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(llama, "--memory", "8GiB") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        "budget 6,758.40 MiB: 8,192.00 less 5% and 1,024.00 MiB for the context and the communicators\n"
    )
    for text in (
        "full_shard, prefetch 1, 8 samples",
        "# Lightning\nfrom lightning.pytorch import Trainer\n",
        "# accelerate launch",
    ):
        assert text in printed


@pytest.mark.exhaustive
def test_nothing_fits(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    assert planned(llama, "--memory", "1100MiB", "--html", str(page)) == 1
    printed, text = capsys.readouterr().out, page.read_text()
    assert '<pre class="failed">nothing fits; nearest: ' in text and "Trainer(strategy=" not in text
    has_plots_of(text, "activation", "compute", "gathers", "to host", "model.layers.3")
    assert "no settings fit 21.00 MiB. " in printed
    assert "(lacks " in printed
    assert "# Lightning" not in printed


def test_json(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(llama, "--memory", "8GiB", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["budget"] == int(0.95 * 8 * 2**30) - 2**30
    assert set(found["best"]) == {"lightning", "accelerate", "yaml", "plain"}
    assert {"candidate", "nbytes", "host_nbytes", "seconds", "lacks", "kinds", "settings"} == set(
        found["candidates"][0]
    )
    assert [note["value"] for note in found["notes"]] == [1]
    assert "find_packed_sequence_indices" in found["notes"][0]["line"]
    assert all(each["nbytes"] >= sum(each["kinds"].values()) for each in found["candidates"])


def test_a_page_with_pictures(llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "plan.html"
    assert planned(llama, "--memory", "8GiB", "--html", str(page)) == 0
    text = page.read_text()
    assert '<pre class="passed">fits: ' in text and "Trainer(strategy=" in text
    has_plots_of(text, "optimizer state", "compute", "between replicas", "model.layers.3")
    assert re.search(r"<p>no_shard over 4 ranks, each of which holds ([\d.]+) of \1 MiB between steps.</p>", text)
    assert "<td>all-reduce</td><td>within a node</td>" in text
    assert "src=" not in text and str(tmp_path) not in text


def has_plots_of(text: str, *names: str) -> None:
    """The page has three plots: of memory, of streams and of units, in which these are."""
    assert text.count("<svg") == 3
    assert ">budget, " in text
    assert [name for name in names if f">{name}<" not in text and f">{name}\n" not in text] == []


def test_more_precision_takes_more(llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    nbytes = {}
    for precision in ("bf16", "fp32"):
        assert planned(llama, "--memory", "8GiB", "--json", "--precision", precision) == 0
        candidates = json.loads(capsys.readouterr().out)["candidates"]
        nbytes[precision] = next(e["nbytes"] for e in candidates if e["settings"].startswith("full_shard, prefetch 1"))
    assert nbytes["bf16"] < nbytes["fp32"]


# No measurement (that is bench/plan.py): what takes a time for each rank takes hours. Processor time, because the time of a clock
# depends on the tests that run beside this one.
LIMITED = """
import resource
import sys

resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, (300, 300))

from torch_shard.cli.main import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
def test_70_billion_parameters_on_16384_ranks_take_minutes_and_4_gib_at_most(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = transformers.AutoConfig.for_model("llama", **sizes, num_key_value_heads=8, vocab_size=128256)
    config.save_pretrained(tmp_path)
    options = ["--batch", "2", "--seq", "4096", "--gpus", "8", "--nodes", "2048", "--memory", "80GiB", "--json"]
    found = json.loads(run_python("-c", LIMITED, "plan", "--model", tmp_path, *options, timeout=600).stdout)
    assert found["candidates"][0]["lacks"] == 0
    assert found["states"] == pytest.approx(16 * 70.55e9 / 16384, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--memory", "many"), "--memory must be a number of bytes such as 80GiB or 24GB, not 'many'."),
        (("--device", "h101"), "device must be one of a100, h100, "),
        (("--device", "mine.json"), "mine.json must be a file with a JSON object, such as {"),
        (("--link", "fast"), "link must be one of nvlink3, "),
        (("--nodes", "0"), "--nodes must be at least 1, not 0."),
    ],
)
def test_bad_arguments(
    llama: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert planned(llama, *arguments) == 2
    assert message in capsys.readouterr().err


def test_the_figures_of_a_device_come_from_a_file(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for flops in (1e12, 1e15):
        file = tmp_path / "mine.json"
        figures = {
            "name": "mine",
            "peak_flops": {"fp32": flops, "bf16": flops},
            "memory_bandwidth": 1e12,
            "memory_bytes": 8e9,
        }
        file.write_text(json.dumps(figures))
        assert planned(llama, "--device", str(file), "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["budget"] == int(8e9 * 0.95) - OUTSIDE
        seconds.append(found["candidates"][0]["seconds"])
    assert seconds[0] > 2 * seconds[1]


def test_an_architecture_that_transformers_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "not_of_this_world"}')
    assert planned(str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "no causal language model of transformers" in said and "not_of_this_world" in said


def test_a_model_in_the_cache_of_the_hub_goes_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pytest.importorskip("huggingface_hub").constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--someone--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0123abc")
    transformers.AutoConfig.for_model("llama", **SIZES).save_pretrained(folder / "snapshots" / "0123abc")
    assert plan._model("someone/small").config.vocab_size == SIZES["vocab_size"]
    assert planned("someone/other") == 2
    assert "--model someone/other: no causal language model of transformers" in capsys.readouterr().err


def test_options_describe_the_hardware(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Hardware] = []

    def note(arguments: Any, hardware: Hardware, autocast: str | None) -> Any:
        found.append(hardware)
        raise ConfigError("it is enough")

    monkeypatch.setattr(plan, "_plan_model", note)
    options = ["--nodes", "2", "--memory", "8GiB", "--margin", "0.25"]
    assert planned(llama, *options, "--link", "pcie5", "--link-between-nodes", "ethernet-25g") == 2
    (hardware,) = found
    assert (hardware.ranks, hardware.ranks_per_node) == (8, 4)
    assert (hardware.intra, hardware.inter) == (link("pcie5"), link("ethernet-25g"))
    assert hardware.budget == 6 * 2**30 - OUTSIDE


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 2), *exhaustive(("adamw", 4), ("adagrad", 3))])
def test_states_are_those_of_the_optimizer_that_is_named(
    llama: str, capsys: pytest.CaptureFixture[str], optimizer: str, states: int
) -> None:
    assert planned(llama, "--memory", "8GiB", "--json", "--optimizer", optimizer) == 0
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(llama))
    shards = torch_shard.make_plan(model, torch_shard.ShardConfig(), 4).predicted.parameters
    assert json.loads(capsys.readouterr().out)["states"] == pytest.approx(states * shards, rel=1e-3)


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(str(tmp_path)) == 2
    assert f"--model {tmp_path}: no causal language model of transformers" in capsys.readouterr().err


CANDIDATES = [
    Candidate("no_shard"),
    Candidate("full_shard", prefetch=2, offload=Offload(), checkpointing=True, micro_batch=2, accumulation=4),
    Candidate("full_shard", offload=Offload(params=False), checkpointing=("Layer", "Block"), activation_offload=True),
    Candidate("hybrid_shard", shard_size=8),
]


OF_LIGHTNING = {"bf16": "bf16-mixed", "fp16": "16-mixed", None: None}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("autocast", ["bf16", "fp16", None])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_the_lines_to_paste_are_settings_of_their_framework(
    candidate: Candidate, autocast: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lightning, accelerate_shard = (pytest.importorskip(name) for name in ("lightning.pytorch", "accelerate_shard"))
    ShardPlugin = accelerate_shard.ShardPlugin
    found: dict[str, Any] = {}

    def note(kind: str) -> Any:
        return lambda *args, **settings: found.setdefault(kind, settings)

    monkeypatch.setattr(lightning, "Trainer", note("trainer"))
    monkeypatch.setattr(accelerate_shard, "Accelerator", note("accelerator"))
    lines = lines_for(candidate, autocast)
    exec(lines["lightning"], {})
    exec(lines["accelerate"], {})
    keys = yaml.safe_load(lines["yaml"])
    plugin = found["accelerator"]["shard_plugin"]
    for name in ("strategy", "prefetch", "shard_size", "activation_checkpointing", "activation_offload"):
        wanted = {"activation_checkpointing": candidate.checkpointing}.get(name, getattr(candidate, name, None))
        assert getattr(plugin, name) == wanted
        in_yaml = keys["fsdp_config"].get(f"shard_{name.removeprefix('shard_')}")
        if in_yaml is None:  # it is left out
            wanted = in_yaml if wanted == getattr(ShardPlugin(), name) else wanted
        assert in_yaml == (",".join(wanted) if isinstance(wanted, tuple) else wanted)
    assert offload_of(plugin.offload) == candidate.offload
    assert read_offload(keys["fsdp_config"].get("shard_offload", "none")) == candidate.offload
    assert found["accelerator"].get("gradient_accumulation_steps", 1) == candidate.accumulation
    assert found["trainer"].get("accumulate_grad_batches", 1) == candidate.accumulation
    assert found["trainer"].get("precision") == OF_LIGHTNING[autocast]
    assert found["accelerator"].get("mixed_precision") == keys.get("mixed_precision") == autocast


class Layer(nn.Sequential):
    pass


@pytest.mark.parametrize("autocast", ["bf16", "fp16", None])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=str)
def test_the_plain_lines_shard_as_was_planned(
    candidate: Candidate, autocast: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[torch_shard.ShardConfig] = []
    monkeypatch.setattr(torch_shard, "shard", lambda model, **given: found.append(torch_shard.ShardConfig(**given)))
    model = nn.Sequential(*[Layer(nn.Linear(2, 2)) for _ in range(3)])
    base = torch_shard.ShardConfig()
    if autocast is not None:
        base = for_autocast(base, model, DTYPES[autocast], "")
    if isinstance(candidate.checkpointing, tuple):
        candidate = dataclasses.replace(candidate, checkpointing=("Layer",))
    exec(lines_for(candidate, autocast)["plain"], {"model": model})
    assert found == [candidate.config(base)]
    recomputing = sum("forward" in vars(layer) for layer in model)
    assert recomputing == (3 if candidate.checkpointing else 0)
    assert (activation_offload_of(model) is not None) == candidate.activation_offload
