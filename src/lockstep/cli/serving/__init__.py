"""What `lockstep serve` and `lockstep gateway` share: options, state, workers, and the run."""
