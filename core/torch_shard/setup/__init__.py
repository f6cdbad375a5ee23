"""From a plain model to a sharded one."""
