"""On the path of programs that a test starts: records what they reach. pytest and the ranks record by themselves."""

import os
import sys

_command = " ".join(sys.orig_argv)
_test = os.environ.get("PYTEST_CURRENT_TEST")

if (
    _test
    and "MUTANTS_RECORD" in os.environ
    and not any(name in _command for name in ("multiprocessing.forkserver", "multiprocessing.resource_tracker"))
):
    try:
        from tools.mutants.record import record_rest
    except ImportError:  # isolated, or in another environment
        pass
    else:
        record_rest(_test.rpartition(" (")[0])
