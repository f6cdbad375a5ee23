"""``transformers.Trainer`` on sharded models."""
