"""A checkpoint that is written while training goes on: the engine writes models and optimizers, then it gets its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from torch_shard.errors import CheckpointError
from torch_shard.frontend.checkpoint import PendingSave
from torch_shard.log import logger

__all__ = ["PendingState"]


class PendingState:
    """One asynchronous ``save_state`` on one rank. Nothing here is collective.

    Args:
        engines_own: of the models and optimizers.
        target: of the checkpoint.
        finish: on rank 0: put it in its place.
        close: on rank 0, in the end: with whether that was done.
    """

    def __init__(
        self, engines_own: PendingSave, target: Path, finish: Callable[[], None], close: Callable[[bool], None]
    ) -> None:
        self.path = target
        self._own: PendingSave | None = engines_own
        self._finish: Callable[[], None] | None = finish
        self._close: Callable[[bool], None] | None = close
        self._error: Exception | None = None
        self._ended = threading.Event()
        # No daemon: a program that ends waits for it.
        threading.Thread(target=self._run, name=f"accelerate_shard save of {target.name}").start()

    def done(self) -> bool:
        """Whether the checkpoint is in its place, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is in its place as far as this rank knows.

        Raises:
            CheckpointError: it has failed; raised once.
        """
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        own, finish, close = self._own, self._finish, self._close
        assert own is not None and finish is not None and close is not None
        # They hold what the checkpoint was made of, which goes with this thread.
        self._own = self._finish = self._close = None
        done = False
        try:
            own.wait()
            finish()
            done = True
        except CheckpointError as error:
            self._error = error
        except Exception as error:
            self._error = CheckpointError(
                f"the asynchronous save to {self.path} failed: {error}. What was at that path before is there still."
            )
            self._error.__cause__ = error
            logger.error("%s", self._error)
        finally:
            close(done)
            del own, finish, close
            self._ended.set()
