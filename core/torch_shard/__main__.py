"""``python -m torch_shard``: runs a script sharded, or a command of ``torch-shard`` by its name."""

from __future__ import annotations

import sys

from .cli.main import COMMANDS, main

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in (*COMMANDS, "--version"):
        sys.exit(main())
    from .launch.runner import main as run

    run(sys.argv[1:])
