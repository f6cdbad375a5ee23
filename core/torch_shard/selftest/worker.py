"""What each rank runs: ``python -m torch_shard.selftest.worker FOLDER``, started by torch.distributed.run.

The folder has the job. Rank 0 notes there each case that begins, and its results when it ends. Each rank notes its own errors.
Notes are lines of JSON, so that those written before a rank died can be read.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from .cases import cases_of
from .context import JOB, NOTES, Context, Setting
from .devices import environment, name_of
from .ranks import Ranks
from .results import error_text


def main(folder: Path) -> None:
    """Run the job's cases until one raises on any rank; then end, since the ranks no longer agree on what comes next."""
    job = json.loads((folder / JOB).read_text())
    setting = Setting(**job["setting"])
    ranks = Ranks(setting.kind, setting.shares)
    context = Context(ranks, setting, folder)
    names = ranks.gather(name_of(ranks.device))
    if ranks.rank == 0:
        _note(folder, 0, environment=environment(ranks.device) | {"devices": names})
    by_name = {case.name: case for case in cases_of(job["part"], setting)}
    for name in job["names"]:
        if ranks.rank == 0:
            _note(folder, 0, begun=name)
        results, good = [], True
        gc.collect()  # the engine of the case before, or this one would not be the only one of its process group
        try:
            results = by_name[name].run(context, by_name[name])
        except Exception as error:
            good = False
            _note(folder, ranks.rank, case=name, rank=ranks.rank, error=error_text(error), at=time.time())
        if not ranks.all_good(name, good, job["seconds"]):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)  # to leave the process group could take until its timeout
        if ranks.rank == 0:
            _note(folder, 0, ended=name, results=[dataclasses.asdict(each) for each in results])
    ranks.leave()


def _note(folder: Path, rank: int, /, **what: Any) -> None:
    """Add a line to a rank's notes."""
    with open(folder / f"{NOTES}-{rank}.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except Exception as error:  # outside of all cases
        rank = int(os.environ["RANK"])
        _note(Path(sys.argv[1]), rank, case=None, rank=rank, error=error_text(error), at=time.time())
        raise
