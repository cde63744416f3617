"""Shared parts of `lockstep serve` and `lockstep gateway`: options, state, workers, and the run."""
