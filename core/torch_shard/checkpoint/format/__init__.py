"""The files of a checkpoint: how tensors, manifests and directories are written and checked."""
