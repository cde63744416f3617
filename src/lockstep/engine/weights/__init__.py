"""Weights: read from disk, shared memory or a broadcast, and what is served."""
