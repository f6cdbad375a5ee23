"""``python -m torch_shard``: the command line, as the script ``torch-shard``."""

from __future__ import annotations

import sys

from .cli.main import main

if __name__ == "__main__":
    sys.exit(main())
