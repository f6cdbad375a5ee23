"""Checkpoints of full tensors in one file or a folder of safetensors."""
