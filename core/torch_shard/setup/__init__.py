"""The set-up of a sharded model from a plain one."""
