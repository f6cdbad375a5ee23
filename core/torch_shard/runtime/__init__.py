"""When things happen: hooks, unshard and reduce schedules, and the order that all ranks keep."""
