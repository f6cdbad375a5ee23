"""Model and optimizer state dicts."""
