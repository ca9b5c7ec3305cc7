"""The `backstay` command: try a TrainingJob on this machine as it would run on a cluster."""
