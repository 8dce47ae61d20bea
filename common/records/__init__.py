"""What a run leaves in its folder: checkpoints, samples, curves, a summary."""
