"""What changes on a model that is sharded or loaded: checks before, and methods that know about shards after."""
