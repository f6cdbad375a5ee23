"""The strategy of the Trainer, and what only the Trainer asks of one."""
