"""The only room that calls torch.distributed: process groups, collectives, watchdog, consensus."""
