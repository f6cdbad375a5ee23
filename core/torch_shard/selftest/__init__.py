"""``torch-shard selftest``: a check of the engine on this machine, with its devices, and a report of what was found.

The parent process starts ranks with ``torch.distributed.run``, in one launch for each part, and initialises no device. The
ranks run the part's cases one by one and note their results in files. If something ends a rank, it is known which case ran, and
the cases after it run in new ranks.
"""
