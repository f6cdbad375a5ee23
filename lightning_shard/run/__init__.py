"""``python -m lightning_shard train.py``: programs that name Lightning's own strategies run sharded, unedited.

:mod:`.takeover` changes what Trainers and Fabrics make of their argument ``strategy``; the modules ``from_*`` say what becomes of
the arguments of DDPStrategy, FSDPStrategy, ModelParallelStrategy and DeepSpeedStrategy.
"""
