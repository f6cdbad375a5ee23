"""What a model is given when it is sharded or loaded: checks, and methods that know about shards."""
