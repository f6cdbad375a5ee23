"""What the strategies of the Trainer and of Fabric save and load: single files, and folders that every rank writes."""
