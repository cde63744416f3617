"""The records of a run: metrics, events, samples, checkpoints."""
