"""``python -m accelerate_shard.cli``: the command line, as the script ``accelerate-shard``."""

from __future__ import annotations

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
