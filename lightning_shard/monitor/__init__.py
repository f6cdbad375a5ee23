"""The callback that logs what sharding costs."""
