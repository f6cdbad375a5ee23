"""The entry point's old place, which installations of before name; the hook is in :mod:`.registration.autoload`."""

from .registration.autoload import install

__all__ = ["install"]
