"""Callbacks that act on their restored state in ``on_fit_start``.

With Lightning's other strategies a checkpoint is restored before that hook; with this one it is restored after it, into shards.
What they would have done there is done here, before optimizers and schedulers are restored, which rely on it.
"""

from __future__ import annotations

from typing import Any

from ._private import Private

__all__ = ["catch_up"]


def catch_up(trainer: Any, private: Private) -> None:
    """Have the callbacks do what they have missed. Not collective; the same on all ranks."""
    for callback in trainer.callbacks:
        if isinstance(callback, private.StochasticWeightAveraging) and callback._scheduler_state is not None:
            # The checkpoint has the state of SWALR, which takes the place of the configured scheduler only when the averaging
            # begins, and is then given that state by the callback: the configured one can't do with it.
            callback._clear_schedulers(trainer)
        if isinstance(callback, private.BaseFinetuning) and callback._restarting:
            # Parameter groups that it had added. Not the callback's own method: users may have put more into that.
            private.BaseFinetuning.on_fit_start(callback, trainer, trainer.lightning_module)
