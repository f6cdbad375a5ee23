"""Checkpoints in which each rank writes its shards, and which load on any number of ranks."""
