"""``python -m torch_shard script``: scripts that name DistributedDataParallel or FSDP run sharded as they are."""
