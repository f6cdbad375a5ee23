"""How Lightning learns the names ``shard``, ``shard_zero2``, ... without an import in the user's code."""
