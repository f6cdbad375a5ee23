"""The steps of optimizers that need full matrices, at the ranks that own them."""
