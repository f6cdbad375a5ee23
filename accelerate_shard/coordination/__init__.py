"""What the ranks agree on outside of the engine: waiting for each other, and uneven numbers of batches."""
