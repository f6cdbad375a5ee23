"""Plain Python and autograd helpers that know nothing of ranks."""
