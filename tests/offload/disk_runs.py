"""Programs that end with a store. Run as ``python -m tests.offload.disk_runs WHAT DIRECTORY RUN``."""

from __future__ import annotations

import os
import sys

import torch

from torch_shard.offload.disk import DiskStore


def main(what: str, directory: str, run: str) -> None:
    store = DiskStore(directory, run=run, rank=3)
    state = store.allocate("state", 1 << 16, torch.float32)
    state.fill_(7.0)
    store.write_behind([state])
    print(store.path, flush=True)
    if what == "raise":
        raise RuntimeError("on purpose")
    if what == "fork":
        if os.fork() == 0:
            sys.exit(0)  # runs the exit functions
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        assert (store.path / "lock").exists() and state.sum() == 7 << 16
        store.write_behind([state])
        store.flush()
        print("kept", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
