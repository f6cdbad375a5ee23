"""A model in a checkpoint, beside the live model that tells which shards are this rank's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...state import model_state
from .checkpoint_dir import Checkpoint
from .entries import Source
from .entry_tree import Stored, map_leaves, model_at


class SavedModel:
    """A model in a checkpoint.

    Attributes:
        source: the live model.
        live: its state dict, with this rank's shards.
        saved: the saved state dict, whose values are leaves of the checkpoint's tree, or nested dicts and lists of these.
    """

    def __init__(self, checkpoint: Checkpoint, tree: dict[Any, Any], source: Source, own_prefixes: bool = True) -> None:
        """Find `source`'s model in the tree of a checkpoint; see :func:`.entry_tree.model_at`."""
        manifest = checkpoint.manifest
        self.source = source
        self.live = model_state.own_state_dict(source.model, source.runtime)
        self.saved = model_at(tree, source.path, self.live, ours=manifest is not None, own_prefixes=own_prefixes)
        self._versions = {} if manifest is None else manifest.module_versions.get(".".join(source.path), {})

    def tensors(self) -> list[tuple[str, Stored, Any]]:
        """Return the saved tensors with their keys and the live entries of the same keys, if there are any."""
        return [(key, own, self.live.get(key)) for key, own in self.saved.items() if isinstance(own, Stored)]

    def objects(self) -> list[Any]:
        """Return the other values of the saved state dict."""
        return [own for own in self.saved.values() if not isinstance(own, Stored)]

    def state_dict(self, values: Callable[[Any], Any] | Mapping[str, Any]) -> Any:
        """Return the saved state dict with values for its leaves, and the versions of the modules' formats if they are known."""
        state = model_state.WithMetadata(map_leaves(self.saved, values))
        if self._versions:
            state._metadata = self._versions
        return state
