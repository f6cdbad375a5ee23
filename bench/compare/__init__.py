"""The parts of bench/compare.py: cases, the engines that run them, processes, verdicts and the table."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the models of cases are in tests/support
