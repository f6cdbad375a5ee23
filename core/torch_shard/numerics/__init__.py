"""Dtypes of a parameter, the block quantizer, stochastic rounding."""
