"""The only room that calls torch.distributed: process groups, collectives, watchdog, consensus.

Exceptions: ``selftest``, which starts its own ranks; ``launch/planned_script.py``, which gives a planned script a fake group;
``shard_tensor/c10d_functions.py``, which maps the user's own calls; and ``layout/dtensor_placement.py``, which redistributes
gradients of DTensors.
"""
