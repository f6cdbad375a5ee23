"""``Fabric(strategy="shard")``: the strategy for Lightning Fabric, in both of its namespaces."""
