"""The plugin that ``enable(plugin)`` was given: the one module-level choice, written by :mod:`accelerate_shard.launch.enable`."""

from __future__ import annotations

from .plugin import ShardPlugin

__all__ = ["enabled_plugin", "set_enabled_plugin"]

_enabled: ShardPlugin | None = None


def enabled_plugin() -> ShardPlugin | None:
    """Return the settings that ``enable`` was given, or None. Not collective."""
    return _enabled


def set_enabled_plugin(plugin: ShardPlugin | None) -> None:
    """Make `plugin` the settings of later Accelerators that are given none. Not collective."""
    global _enabled
    _enabled = plugin
