"""The sharded parameter that users hold, its operations, and the unsharded parameter that modules compute with."""

from . import tensor as tensor
