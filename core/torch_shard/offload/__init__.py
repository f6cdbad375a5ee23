"""Training with parameters, gradients or optimizer state in host memory, or optimizer state on disk."""
