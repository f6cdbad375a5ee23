"""The result of a branch of this process."""

from __future__ import annotations

import os
import signal

import pytest

from torch_shard.errors import ShardError
from torch_shard.utils.branch import Branch, branch


def result_of_a_branch_that_is_killed_while_it_writes() -> object:
    found = branch()
    if isinstance(found, Branch):
        os.write(found._pipe, (100).to_bytes(8, "little") + b"half of it")
        os.kill(os.getpid(), signal.SIGKILL)
    return found


def test_a_branch_that_is_killed_while_it_writes_is_an_error_that_says_so():
    with pytest.raises(ShardError, match="was ended by SIGKILL before it had a result"):
        result_of_a_branch_that_is_killed_while_it_writes()
