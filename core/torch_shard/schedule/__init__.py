"""When units are gathered and reduced, and when inputs of layers are in host memory.

Training and the prediction of its memory both call this code, so that they decide alike.
"""
