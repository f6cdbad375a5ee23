"""When units are gathered and reduced, and when inputs of layers are in host memory.

Training and the prediction of its memory both call what stands here, so that they decide alike.
"""
