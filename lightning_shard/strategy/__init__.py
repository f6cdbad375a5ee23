"""What the strategies of the Trainer and of Fabric share beside checkpoints: settings, precision, processes."""
