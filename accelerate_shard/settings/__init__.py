"""The user's settings: the plugin, and the translation of other sources (launch, FSDP, DDP) into it."""
