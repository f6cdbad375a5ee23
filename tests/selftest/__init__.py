"""Tests of ``torch-shard selftest``."""
