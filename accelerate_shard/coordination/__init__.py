"""Coordination of the ranks outside of the engine: waiting for each other, and uneven numbers of batches."""
