"""Tests of ``python -m torch_shard``."""
