"""Work on checkpoints without a model: classify, verify, compare, convert."""
