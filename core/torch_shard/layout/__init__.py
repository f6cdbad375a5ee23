"""Where parameters lie in a flat buffer, and how tensors and ranks are divided: integers only."""
