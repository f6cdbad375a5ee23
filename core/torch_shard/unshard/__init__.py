"""Full parameters for reading and writing, as FSDP's ``summon_full_params`` gives them."""
