"""What the user chooses: the plugin, and the translations of other sources (launch, FSDP, DDP) into it."""
