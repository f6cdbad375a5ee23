"""How long a plan takes, and how much memory.

    python bench/plan.py                1B parameters on one node, and 70B parameters on 16,384 ranks
    python bench/plan.py --models 1B

Each is a process of its own, ``torch-shard plan --model``, whose time includes the imports of torch and transformers.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from typing import Any

import torch
import transformers

# The shapes of Llama 3.2 1B and Llama 3.1 70B.
_COMMON = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "1B": (
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
        ["--batch", "4", "--seq", "2048", "--gpus", "8", "--memory", "80GiB"],
    ),
    "70B": (
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
        ["--batch", "2", "--seq", "4096", "--gpus", "8", "--nodes", "2048", "--memory", "80GiB"],
    ),
}


def run(arguments: list[str]) -> tuple[float, float]:
    """Return the seconds that a process takes, and the most GiB of memory that it has."""
    start = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert isinstance(usage, resource.struct_rusage)
    if process.returncode > 1:
        raise SystemExit(f"{arguments} has failed")
    return time.perf_counter() - start, usage.ru_maxrss / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of: {','.join(MODELS)}")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, {date.today()}")
    imports = "import torch, transformers; transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM"
    seconds, _ = run(["-c", imports])
    print(f"imports alone: {seconds:.1f} s", flush=True)
    for name in args.models.split(","):
        sizes, arguments = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            transformers.LlamaConfig(**_COMMON, **sizes).save_pretrained(folder)
            seconds, gib = run(["-m", "torch_shard", "plan", "--model", folder, *arguments])
        print(f"{name}, {' '.join(arguments)}: {seconds:.1f} s with imports, {gib:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
