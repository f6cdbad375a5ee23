"""Tests that need a GPU; conftest.py marks and skips them."""
