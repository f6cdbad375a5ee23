"""Frozen settings, validated on construction."""
