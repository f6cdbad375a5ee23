"""Optimizers of whole matrices step on each matrix at the rank that owns it."""
