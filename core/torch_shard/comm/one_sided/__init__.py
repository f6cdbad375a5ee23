"""One-sided reads: a rank reads the shards of its partners while they do something else."""
