"""Integers only: where parameters lie in a flat buffer, how tensors and ranks are divided."""
