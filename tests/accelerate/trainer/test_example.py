"""``examples/trainer_sft.py`` runs as its help says, and what it saves is plain."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import LlamaForCausalLM

from tests.support.run_python import run_python

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "trainer_sft.py"


@pytest.mark.exhaustive
def test_the_example_fine_tunes_adapters_on_what_it_has_trained(tmp_path):
    arguments = ("--pretrain-steps", 30, "--steps", 8, "--output", tmp_path / "out")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    printed = run_python(*launcher, EXAMPLE, *arguments, folder=tmp_path, timeout=280).stdout
    before, after = map(float, re.findall(r"held-out docstrings: ([\d.]+).*, ([\d.]+) after", printed)[-1])
    assert after < before
    model = PeftModel.from_pretrained(
        LlamaForCausalLM.from_pretrained(tmp_path / "out" / "base"), tmp_path / "out" / "adapters"
    )
    assert all(type(p.data).__name__ == "Tensor" for p in model.parameters())
