"""Element-wise optimizers step on flat runs of this rank's shards."""
