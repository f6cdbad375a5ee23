"""Coordination of the ranks outside of the engine: where dataloaders begin, and uneven numbers of batches."""
