"""The launchers of the Trainer's strategy."""

from __future__ import annotations

from typing import Any

from .._private import MixinBase, asked_weights_only


class LauncherMixin(MixinBase):  # type: ignore[misc]
    """Keeps the user's ``weights_only`` for checkpoints that the run reads without it, as the learning-rate finder does."""

    def launch(self, function: Any, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the ranks and run `function` on each."""
        if trainer is not None:
            trainer.strategy._weights_only_asked = asked_weights_only(function, args, kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)
