"""The parameters that travel together: their flat buffers, gradient buffers and states."""
