"""Starts the ranks: ``python -m torch_shard.selftest.launcher FOLDER RANKS``.

It is torch.distributed.run on one machine. In addition it notes in the folder which rank failed first, and how, which torch only
prints.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from .context import EXIT


def main(folder: Path, ranks: int) -> int:
    """Run the worker on all ranks, and return the exit code: 0, or 1 after a rank has failed."""
    # A free port of this machine, by an address that does not depend on how its name resolves.
    place = ["--standalone", "--local-addr", "localhost", "--max-restarts", "0", "--nproc-per-node", str(ranks)]
    try:
        run.main([*place, "-m", "torch_shard.selftest.worker", str(folder)])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        by = f"ended by {failure.signal_name()}" if failure.exitcode < 0 else f"ended with exit code {failure.exitcode}"
        (folder / EXIT).write_text(f"rank {rank} {by}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
