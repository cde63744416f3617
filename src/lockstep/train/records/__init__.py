"""What a run writes down: metrics, events, samples, checkpoints."""
