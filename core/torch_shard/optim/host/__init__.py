"""Optimizer steps on shards that are in host memory."""
